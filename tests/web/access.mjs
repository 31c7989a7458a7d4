// The dashboard before a server that wants a key, and before one that goes away.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { axe, launch, openPage, screenshot, sideways } from "./support/browser.mjs";
import { startServer, temporaryFolder, until } from "./support/server.mjs";

const key = "a-key-of-this-test";
let browser, server, folder;
before(async () => {
  folder = temporaryFolder();
  browser = await launch();
  server = await startServer({ db: `${folder.path}/access.db`, key });
});
after(async () => {
  await browser?.close();
  await server?.stop();
  folder?.remove();
});

// The browser itself writes failed fetches to the console.
const allow = [/status of 401/, /ERR_CONNECTION/, /ERR_EMPTY_RESPONSE/, /ERR_SOCKET/];

test("a key is asked for, refused when wrong, kept for the tab, and never put into an address", async (t) => {
  assert.equal((await fetch(`${server.url}admin/api/status`)).status, 401);
  assert.equal((await fetch(server.url)).status, 200);
  const { page, context, faults } = await openPage(browser, server.url, undefined, allow);
  t.after(() => context.close());
  const addresses = [];
  page.on("request", (r) => addresses.push(r.url()));
  await page.getByText("This server asks for its key").waitFor();
  await screenshot(page, "key");
  assert.deepEqual(await axe(page), []);
  assert.equal(await sideways(page), 0);
  await page.getByLabel("API key").fill("wrong");
  await page.keyboard.press("Enter");
  await page.getByText("The server did not accept that key.").waitFor();
  await page.getByLabel("API key").fill(key);
  await page.getByRole("button", { name: "Open the dashboard" }).click();
  await page.locator(".stats").waitFor();
  await page.reload();
  await page.locator(".stats").waitFor();
  // Exports need the key too: they cannot be plain links.
  await page.goto(`${server.url}#/requests`);
  await server.post("v1/chat/completions", { messages: [{ role: "user", content: "Say hello to Carol." }], max_tokens: 4 });
  await page.locator("tbody tr").first().waitFor();
  const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Export CSV" }).click()]);
  assert.equal(file.suggestedFilename(), "ddtree-requests.csv");
  assert.ok(!addresses.some((a) => a.includes(key)), "the key is in an address");
  assert.equal(await page.evaluate(() => localStorage.length), 0);
  assert.deepEqual(await faults(), []);
  // Another tab has to ask again.
  const other = await openPage(browser, server.url, undefined, allow);
  t.after(() => other.close());
  await other.page.getByText("This server asks for its key").waitFor();
});

test("a server that is gone is told, and its return too", async (t) => {
  const { page, context } = await openPage(browser, server.url, undefined, allow);
  t.after(() => context.close());
  await page.getByLabel("API key").fill(key);
  await page.keyboard.press("Enter");
  await page.locator(".stats").waitFor();
  const { port } = server;
  await server.stop("SIGKILL");
  await page.getByRole("alert").filter({ hasText: "does not answer" }).waitFor();
  await page.getByText("disconnected").waitFor();
  assert.equal(await page.locator(".stats").count(), 1, "the last figures went away");
  assert.deepEqual(await axe(page), []);
  await screenshot(page, "disconnected");
  server = await startServer({ db: `${folder.path}/access.db`, key, port });
  await page.getByRole("alert").waitFor({ state: "detached" });
  await page.goto(`${server.url}#/history`);
  await until("the crash in the history", async () => /crashed/.test(await page.locator("tbody").first().innerText()));
});

test("a hidden page rests", async (t) => {
  const { page, context } = await openPage(browser, server.url, undefined, allow);
  t.after(() => context.close());
  await page.getByLabel("API key").fill(key);
  await page.keyboard.press("Enter");
  await page.locator(".stats").waitFor();
  let asked = 0;
  page.on("request", (r) => (asked += r.url().includes("/admin/api/") ? 1 : 0));
  const hide = (hidden) =>
    page.evaluate((h) => {
      Object.defineProperty(document, "hidden", { configurable: true, get: () => h });
      document.dispatchEvent(new Event("visibilitychange"));
    }, hidden);
  await until("polling", () => asked >= 2);
  await hide(true);
  await page.waitForTimeout(1000); // what is under way ends
  asked = 0;
  await page.waitForTimeout(3500);
  assert.equal(asked, 0);
  await hide(false);
  await until("polling again", () => asked >= 2);
});

test("skipping the smoke test is said on every page", async (t) => {
  const other = await startServer({ db: `${folder.path}/skip.db`, flags: ["--skip-smoke"] });
  t.after(() => other.stop());
  const { page, context, faults } = await openPage(browser, other.url);
  t.after(() => context.close());
  for (const hash of ["#/now", "#/history", "#/requests", "#/smoke"]) {
    await page.goto(other.url + hash);
    await page.getByText("This server runs without its smoke test").waitFor();
  }
  await screenshot(page, "smoke-skipped");
  assert.deepEqual(await axe(page), []);
  assert.deepEqual(await faults(), []);
});
