// Light or dark: the system's wish unless the toggle was used here.
import { computed, effect, signal } from "@preact/signals";

const name = "ddtree-theme";
const media = matchMedia("(prefers-color-scheme: dark)");
const system = signal(media.matches ? "dark" : "light");
media.addEventListener("change", (event) => {
  system.value = event.matches ? "dark" : "light";
});

function remembered(): string {
  try {
    const value = localStorage.getItem(name);
    return value === "light" || value === "dark" ? value : "";
  } catch {
    return "";
  }
}

const chosen = signal(remembered());
export const theme = computed(() => chosen.value || system.value);

effect(() => {
  if (chosen.value) document.documentElement.dataset.theme = chosen.value;
  else delete document.documentElement.dataset.theme;
});

// A choice that equals the system's wish is no choice: then the system is followed again.
export function toggleTheme() {
  const next = theme.value === "dark" ? "light" : "dark";
  chosen.value = next === system.value ? "" : next;
  try {
    if (chosen.value) localStorage.setItem(name, chosen.value);
    else localStorage.removeItem(name);
  } catch {
    // Without storage the choice lasts as long as the page.
  }
}
