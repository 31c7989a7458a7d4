// Where we are: #/requests/ID?finish=stop. The hash is the whole state of a page that is worth a link.
import { computed, signal } from "@preact/signals";

function read() {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

export const route = signal(read());
addEventListener("hashchange", () => {
  route.value = read();
});

export const page = computed(() => route.value.parts[0] ?? "now");

export function href(parts: (string | number)[], query?: Record<string, string | number>): string {
  const given = Object.entries(query ?? {}).filter(([, v]) => v !== "" && v !== undefined);
  const text = new URLSearchParams(given.map(([k, v]) => [k, String(v)])).toString();
  return `#/${parts.map((p) => encodeURIComponent(p)).join("/")}${text ? `?${text}` : ""}`;
}

// Changes the query of the page we are on, without a new history entry for each keystroke.
export function setQuery(changes: Record<string, string>) {
  const query = new URLSearchParams(route.value.query);
  for (const [k, v] of Object.entries(changes)) {
    if (v) query.set(k, v);
    else query.delete(k);
  }
  history.replaceState(null, "", href(route.value.parts, Object.fromEntries(query)));
  route.value = read();
}
