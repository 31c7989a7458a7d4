// One Chromium, pages that watch themselves: errors, policy violations and requests elsewhere are kept and must be none.
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const axeSource = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const shots = new URL("../screenshots/", import.meta.url).pathname;
mkdirSync(shots, { recursive: true });

export const looks = [
  { name: "light", viewport: { width: 1280, height: 860 }, colorScheme: "light" },
  { name: "dark", viewport: { width: 1280, height: 860 }, colorScheme: "dark" },
  { name: "phone", viewport: { width: 360, height: 740 }, colorScheme: "light", hasTouch: true },
  { name: "phone-dark", viewport: { width: 360, height: 740 }, colorScheme: "dark", hasTouch: true },
];

export function launch() {
  return chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
  });
}

// `faults` collects what must not happen; `allow` are patterns of console errors that the test itself provokes.
export async function openPage(browser, url, look = looks[0], allow = []) {
  const { name: _name, ...options } = look;
  const context = await browser.newContext({ ...options, reducedMotion: "reduce", acceptDownloads: true });
  const page = await context.newPage();
  const faults = [];
  const origin = new URL(url).origin;
  page.on("console", (m) => {
    if (m.type() === "error" && !allow.some((a) => a.test(m.text()))) faults.push(`console: ${m.text()}`);
  });
  page.on("pageerror", (e) => faults.push(`page error: ${e.stack ?? e}`));
  page.on("dialog", (d) => {
    faults.push(`dialog: ${d.message()}`);
    void d.dismiss();
  });
  context.on("request", (r) => {
    if (!/^(data|blob):/.test(r.url()) && new URL(r.url()).origin !== origin) faults.push(`request elsewhere: ${r.url()}`);
  });
  await page.addInitScript(() => {
    globalThis.violations = [];
    document.addEventListener("securitypolicyviolation", (e) => globalThis.violations.push(`${e.violatedDirective} ${e.blockedURI} ${e.sourceFile}:${e.lineNumber}`));
  });
  page.setDefaultTimeout(20_000);
  await page.goto(url);
  return {
    page,
    context,
    async faults() {
      const violations = await page.evaluate(() => globalThis.violations);
      return [...faults, ...violations.map((v) => `policy: ${v}`)];
    },
    close: () => context.close(),
  };
}

export async function screenshot(page, name) {
  await page.screenshot({ path: `${shots}${name}.png`, fullPage: true });
}

// Serious and critical faults by axe, one line each.
export async function axe(page) {
  await page.evaluate(axeSource);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  return violations
    .filter((v) => v.impact === "serious" || v.impact === "critical")
    .flatMap((v) => v.nodes.map((n) => `${v.impact} ${v.id}: ${n.target.join(" ")}: ${n.failureSummary?.split("\n").slice(1).join("; ")}`));
}

// How far the page can be scrolled sideways, in pixels.
export function sideways(page) {
  return page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
}
