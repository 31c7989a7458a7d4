// The past: time line, starts and smoke runs side by side, percentiles, acceptance, alerts and the ladder; over a history with a known past
// (support/past.py) that a real server then goes on with.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { after, before, describe, test } from "node:test";
import { axe, launch, looks, openPage, screenshot, sideways } from "./support/browser.mjs";
import { faultyBinary, startServer, temporaryFolder, until } from "./support/server.mjs";

let browser, server, folder, past;
before(async () => {
  folder = temporaryFolder();
  const db = `${folder.path}/past.db`;
  browser = await launch();
  await (await startServer({ db, flags: ["--skip-smoke"] })).stop();
  past = JSON.parse(execFileSync("python3", [new URL("support/past.py", import.meta.url).pathname, db], { encoding: "utf8", maxBuffer: 1 << 26 }));
  server = await startServer({ db });
});
after(async () => {
  await browser?.close();
  await server?.stop();
  folder?.remove();
});

async function open(t, hash, look) {
  const opened = await openPage(browser, server.url + hash, look);
  t.after(async () => opened.close());
  return opened;
}
const pagesOf = () => ({
  "past-history": [`#/history/${past.second}`, ".tl-ladder circle"],
  "past-compare": [`#/history/compare?ids=${past.first},${past.second}`, ".compare tbody tr"],
  "past-requests": ["#/requests", "tbody tr.link"],
  "past-acceptance": ["#/acceptance", ".heat tbody tr"],
  "past-smoke-compare": [`#/smoke/compare?ids=${past.smokes.join()}`, ".compare .output"],
});
// The status as the server gives it, changed on its way.
const changed = (page, change) =>
  page.route("**/admin/api/status", async (route) => {
    const body = await (await route.fetch()).json();
    change(body);
    await route.fulfill({ json: body });
  });
const steps = ["DDTREE", "reset", "DFLASH", "NONE", "degraded", "restart", "exit"];

describe("looks", () => {
  // Dark on a phone is dark and a phone: dashboard.mjs looks at it.
  for (const look of looks.slice(0, 3))
    test(`every view of the past in ${look.name}: no fault, no sideways scroll, nothing for axe`, async (t) => {
      const { page, faults } = await open(t, "#/nowhere", look);
      for (const [name, [hash, settled]] of Object.entries(pagesOf())) {
        await page.goto(server.url + hash);
        await page.waitForSelector(settled);
        await screenshot(page, `${name}-${look.name}`);
        assert.equal(await sideways(page), 0, `${name} scrolls sideways`);
        assert.deepEqual(await axe(page), [], `axe on ${name}`);
      }
      assert.deepEqual(await faults(), []);
    });

  test("empty states say what will appear", async (t) => {
    const { page, faults } = await open(t, "#/nowhere");
    await page.route("**/admin/api/acceptance?*", (r) => r.fulfill({ json: { speculative: { requests: 0, rounds: 0, accepted: 0, accepted_at: [], histogram: [] }, by_mode: [], by_thinking: [], by_context: [] } }));
    for (const [hash, words] of [["#/acceptance", "No request has made a round yet"], ["#/acceptance?mode=NEXTN", "No request matches"], ["#/history/compare", "No starts were chosen"], ["#/smoke/compare", "No runs were chosen"]]) {
      await page.goto(server.url + hash);
      const empty = page.locator(".empty", { hasText: words });
      await empty.waitFor();
      assert.ok((await empty.innerText()).length > words.length + 15, `${hash} only says ${words}`);
      assert.deepEqual(await axe(page), []);
    }
    assert.deepEqual(await faults(), []);
  });
});

describe("the service's past", () => {
  test("time line: starts, phases, marks, the failure and the ladder's way down and up", async (t) => {
    const { page, faults } = await open(t, `#/history/${past.second}`);
    await page.locator(".tl-ladder circle").first().waitFor();
    const line = page.getByRole("region", { name: "Time line of starts" });
    const timeline = await server.api("timeline");
    assert.equal(timeline.runs.length, 4); // three of the past, and this
    assert.equal(await line.locator(".tl-run").count(), 4);
    assert.equal(await line.locator(".tl-spot").count(), 1);
    assert.equal(await line.locator(".tl-degraded").count(), 1);
    const run = timeline.runs.find((r) => r.id === past.second);
    const faultsOfRun = run.events.filter((e) => e.kind.startsWith("fault."));
    assert.equal(faultsOfRun.length, 4);
    assert.ok(!run.events.some((e) => e.kind === "speculation.fallback"), "an event without a mark is in the picture");
    const moves = run.events.filter((e) => e.kind === "ladder");
    assert.equal(moves.length, 7);
    // Four steps down, three up, drawn once for all starts and once for the chosen one.
    for (const name of ["Time line of starts", "Time line of this start"]) {
      const region = page.getByRole("region", { name });
      assert.equal(await region.locator(".tl-ladder .down").count(), 4);
      assert.equal(await region.locator(".tl-ladder .up").count(), 3);
      const ys = await region.locator(".tl-ladder circle").evaluateAll((l) => l.map((c) => [Number(c.getAttribute("cx")), Number(c.getAttribute("cy"))]));
      assert.ok(ys.every(([x], i) => i === 0 || x >= ys[i - 1][0]), "steps are not in the order of time");
      for (let i = 1; i < 4; ++i) assert.ok(ys[i][1] > ys[i - 1][1], "a step down is not drawn lower");
      for (let i = 4; i < 7; ++i) assert.ok(ys[i][1] < ys[i - 1][1], "a step up is not drawn higher");
    }
    assert.match(await line.locator("svg").getAttribute("aria-label"), /1 crash or failure.*7 steps of the fault ladder/);
    const events = page.locator(".panel", { hasText: "Events" }).locator(".events").last();
    for (const part of ["found at 6.0 h", "fault.wrong-text", "NONE to DFLASH"]) assert.ok((await events.innerText()).includes(part), part);
    // The failed start says why.
    await page.goto(`${server.url}#/history/${past.broken}`);
    await page.locator(".facts dd").filter({ hasText: "expected [64, 256] (exit 65)" }).waitFor();
    assert.deepEqual(await faults(), []);
  });

  test("two starts are chosen by keyboard and stand side by side, what differs first", async (t) => {
    const { page, faults } = await open(t, "#/history");
    const boxes = page.locator(".pick input");
    await boxes.nth(3).waitFor();
    assert.equal(await boxes.count(), 4);
    const { runs } = await server.api("runs");
    const place = (id) => runs.findIndex((r) => r.id === id);
    await page.getByText("choose two starts to compare").waitFor();
    for (const id of [past.first, past.second]) {
      await boxes.nth(place(id)).focus();
      await page.keyboard.press("Space");
    }
    await page.getByRole("link", { name: "Compare 2 starts" }).focus();
    await page.keyboard.press("Enter");
    await page.locator(".compare tbody tr").first().waitFor();
    const c = await server.api(`runs/compare?ids=${past.first},${past.second}`);
    const differing = c.rows.filter((r) => r.differs);
    const shown = await page.getByRole("region", { name: "What differs" }).locator("tbody tr").count();
    assert.equal(shown, differing.length);
    const words = await page.getByRole("region", { name: "What differs" }).innerText();
    for (const part of ["0.0.9", "0.1.0", "--store-text", "kv_pages", "256", "512", "Change"]) assert.ok(words.includes(part), `${part} is not in ${words}`);
    assert.ok(!differing.some((r) => r.name === "--port"));
    // Figures against the past as it was written, not as the server reads it.
    const median = (run) => {
      const speeds = past.requests.filter((r) => r.run_id === run).map((r) => r.tokens_per_second).sort((a, b) => a - b);
      return speeds[Math.ceil(speeds.length / 2) - 1];
    };
    const speed = c.rows.find((r) => r.name === "tok/s, median");
    [past.first, past.second].forEach((run, i) => assert.ok(Math.abs(speed.values[i] - median(run)) < 1e-9));
    await page.getByRole("link", { name: "Swap" }).click();
    await until("the swapped columns", async () => /0\.1\.0[\s\S]*0\.0\.9/.test(await page.getByRole("region", { name: "What differs" }).innerText()));
    assert.deepEqual(await faults(), []);
  });
});

describe("requests and acceptance", () => {
  // By counting, as the definition says: the smallest value that p % of all do not exceed.
  const percentile = (values, p) => Math.min(...values.filter((v) => values.filter((w) => w <= v).length * 100 >= p * values.length));

  test("percentiles follow the filter; orders go both ways", async (t) => {
    const { page, faults } = await open(t, "#/requests");
    const table = page.getByRole("region", { name: "Percentiles" });
    await table.waitFor();
    for (const [filter, keep] of [["", () => true], ["mode=DDTREE&thinking=1", (r) => r.mode === "DDTREE" && r.thinking === 1], ["context_from=1024&context_to=8192", (r) => r.prompt_tokens + r.completion_tokens >= 1024 && r.prompt_tokens + r.completion_tokens < 8192]]) {
      const s = await server.api(`requests/summary?${filter}`);
      const rows = past.requests.filter(keep);
      assert.equal(s.totals.requests, rows.length);
      for (const [name, of] of [["ttft_ms", (r) => r.first_token_ms], ["total_ms", (r) => r.total_ms], ["tokens_per_second", (r) => r.tokens_per_second]])
        for (const p of [50, 90, 95, 99]) assert.ok(Math.abs(s[name][`p${p}`] - percentile(rows.map(of), p)) < 1e-9, `${name} p${p} ${filter}`);
      const speculative = rows.filter((r) => r.mode !== "NONE");
      assert.ok(Math.abs(s.tokens_per_round.p95 - percentile(speculative.map((r) => 1 + r.accepted / r.rounds), 95)) < 1e-9);
    }
    await page.getByLabel("Mode").selectOption("DDTREE");
    await page.getByLabel("Thinking").selectOption("1");
    await page.getByLabel("Context").selectOption("1024-8192");
    const want = past.requests.filter((r) => r.mode === "DDTREE" && r.thinking === 1 && r.prompt_tokens + r.completion_tokens >= 1024 && r.prompt_tokens + r.completion_tokens < 8192);
    assert.ok(want.length > 3);
    await page.getByText(`${want.length} match`).waitFor();
    const p50 = percentile(want.map((r) => r.tokens_per_second), 50);
    await until("the percentiles of the filter", async () => (await table.locator("tbody tr").nth(2).locator("td").first().innerText()) === (p50 >= 100 ? p50.toFixed(0) : p50.toFixed(1)));
    const speeds = async () => (await page.locator("tbody tr.link td:nth-child(9)").allInnerTexts()).map(Number);
    const button = page.getByRole("button", { name: "tok/s" });
    await button.click();
    await until("falling speeds", async () => { const s = await speeds(); return s.length === want.length && s.every((v, i) => i === 0 || v <= s[i - 1]); });
    await button.press("Enter");
    await until("rising speeds", async () => { const s = await speeds(); return s.length === want.length && s.every((v, i) => i === 0 || v >= s[i - 1]); });
    assert.equal(await page.locator("th[aria-sort]").getAttribute("aria-sort"), "ascending");
    const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Export CSV" }).click()]);
    const chunks = [];
    for await (const c of await file.createReadStream()) chunks.push(c);
    const csv = Buffer.concat(chunks).toString("utf8").trimEnd().split("\r\n");
    assert.equal(csv.length, want.length + 1);
    const slowest = [...want].sort((a, b) => a.tokens_per_second - b.tokens_per_second)[0];
    assert.ok(csv[1].includes(slowest.request_id), "the export does not have the order shown");
    assert.deepEqual(await faults(), []);
  });

  test("acceptance by position, mode, thinking and context length is what the requests had", async (t) => {
    const { page, faults } = await open(t, "#/acceptance");
    const speculative = past.requests.filter((r) => r.mode !== "NONE");
    const sum = (list, of) => list.reduce((n, r) => n + of(r), 0);
    const rounds = sum(speculative, (r) => r.rounds);
    const at = (list, i) => sum(list, (r) => JSON.parse(r.accepted_at)[i] ?? 0);
    const bars = page.getByRole("list", { name: "Acceptance by position" });
    await bars.waitFor();
    const shown = (await bars.locator(".value").allInnerTexts()).map((v) => parseFloat(v.replace("<", "")));
    shown.forEach((v, i) => assert.ok(Math.abs(v - (100 * at(speculative, i)) / rounds) <= 0.51, `position ${i + 1}: ${v}`));
    const cell = async (region, row, column) => (await page.getByRole("region", { name: region, exact: true }).locator("tbody tr", { has: page.getByRole("rowheader", { name: row, exact: true }) }).locator("td").nth(column).innerText()).replace(/\u202f/g, "");
    for (const mode of ["DDTREE", "DFLASH", "NONE"]) {
      const list = past.requests.filter((r) => r.mode === mode);
      assert.equal(await cell("By mode", mode, 0), String(list.length));
      assert.equal(await cell("By mode", mode, 1), String(sum(list, (r) => r.rounds)));
      assert.equal(await cell("By mode", mode, 3), (1 + sum(list, (r) => r.accepted) / sum(list, (r) => r.rounds)).toFixed(2));
    }
    const on = speculative.filter((r) => r.thinking === 1);
    assert.equal(await cell("By thinking", "on", 2), (1 + sum(on, (r) => r.accepted) / sum(on, (r) => r.rounds)).toFixed(2));
    const long = speculative.filter((r) => r.prompt_tokens + r.completion_tokens >= 8192 && r.prompt_tokens + r.completion_tokens < 16384);
    assert.equal(await cell("By context length", "8 K – 16 K", 0), String(long.length));
    await page.getByRole("combobox", { name: "Mode" }).selectOption("DFLASH");
    await until("only DFLASH", async () => (await page.getByRole("region", { name: "By mode", exact: true }).locator("tbody tr").count()) === 1);
    assert.match(page.url(), /mode=DFLASH/);
    assert.deepEqual(await faults(), []);
  });
});

test("smoke runs side by side: checks in rows, outputs compared", async (t) => {
  const { page, faults } = await open(t, "#/smoke");
  const boxes = page.locator(".pick input");
  await boxes.nth(2).waitFor();
  const list = (await server.api("smoke")).runs;
  for (const id of past.smokes) {
    await boxes.nth(list.findIndex((r) => r.id === id)).focus();
    await page.keyboard.press("Space");
  }
  await page.getByRole("link", { name: "Compare 2 runs" }).click();
  const table = page.getByRole("region", { name: "Checks side by side" });
  await table.waitFor();
  const rows = table.locator("tr.differs");
  assert.equal(await rows.count(), 2);
  assert.deepEqual(await rows.nth(0).locator(".output").allTextContents(), ["def gcd(a, b):\n    return a", "def gcd(a, b):\n    while b: a, b = b, a % b\n    return a"]);
  assert.match(await rows.nth(1).innerText(), /passed[\s\S]*failed[\s\S]*token 14 is 498[\s\S]*the same text/);
  await page.goto(`${server.url}#/smoke/compare?ids=${list[0].id},${past.skipped}`);
  await page.getByText("not checked").first().waitFor();
  assert.deepEqual(await faults(), []);
});

test("a real fault: the ladder's way down and up is drawn as it goes, and told over the page until it is over", async (t) => {
  const faulty = await startServer({ db: `${folder.path}/faulty.db`, program: faultyBinary, flags: ["--inject", "nan-logits:after=12,for=2", "--ladder-settle", "0.5", "--ladder-proof", "4", "--canary-interval", "0"] });
  t.after(() => faulty.stop());
  const { page, context, faults } = await openPage(browser, `${faulty.url}#/now`);
  t.after(() => context.close());
  await page.locator(".rungs").waitFor();
  const moves = async () => (await faulty.api("events?kind=ladder&limit=50")).events;
  await until("a step down", async () => {
    await faulty.post("v1/chat/completions", { messages: [{ role: "user", content: "List the numbers from 35 to 61." }], temperature: 0, max_tokens: 60 });
    return (await moves()).length > 0;
  }, 60_000);
  const alert = page.getByRole("list", { name: "Alerts" }).getByRole("listitem").filter({ hasText: "below “DDTREE”" });
  await alert.waitFor();
  assert.match(await alert.innerText(), /not finite|nan/i);
  await page.locator(".rungs .here.low").waitFor();
  await screenshot(page, "ladder-down");
  await until("the top again", async () => (await faulty.api("status")).ladder.step === "DDTREE", 90_000);
  await alert.waitFor({ state: "detached" });
  // The status is a commit ahead of the history.
  const told = await until("the way in the history", async () => {
    const list = await moves();
    return list.length >= 2 && list[0].detail.to === "DDTREE" && list;
  });
  await page.goto(`${faulty.url}#/history`);
  const line = page.getByRole("region", { name: "Time line of this start" });
  await until("every step in the picture", async () => (await line.locator(".tl-ladder circle").count()) === told.length);
  assert.equal(await line.locator(".tl-ladder .down").count(), told.filter((e) => e.detail.direction === "down").length);
  await screenshot(page, "ladder-way");
  assert.deepEqual(await axe(page), []);
  assert.deepEqual(await faults(), []);
});

describe("alerts", () => {
  test("a service that is well has none; the ladder stands at its top", async (t) => {
    const { page } = await open(t, "#/now");
    await page.locator(".rungs").waitFor();
    const s = await server.api("status");
    assert.equal(s.phase.word, "ready");
    assert.deepEqual(await page.locator(".rungs li").allInnerTexts(), s.ladder.steps);
    assert.equal(await page.locator(".rungs [aria-current=step]").innerText(), s.ladder.steps[0]);
    assert.equal(await page.getByRole("list", { name: "Alerts" }).count(), 0);
  });

  const cases = [
    ["degraded", (s) => (s.phase = { word: "degraded", sentence: "Serving, but degraded: tok/s fell to a third.", since: s.now - 90e3, progress: null }), /tok\/s fell to a third\. Since .* \(1 min 30 s\)/],
    ["failed", (s) => (s.phase = { word: "failed", sentence: "Failed: device lost.", since: s.now - 5e3, progress: null }), /device lost/],
    ["ladder", (s) => (s.ladder = { step: "NONE", mode: "NONE", since_ms: s.now - 3600e3, reason: "wrong-text: the tail is not the target's", steps }), /ladder is at “NONE”, below “DDTREE”: wrong-text: the tail.*Since .* \(1 h 0 min\)/],
    ["store", (s) => Object.assign(s.store, { writable: false, message: "database or disk is full", failing_since: s.now - 10e3, queued_rows: 12, dropped_rows: 3 }), /answers are not affected.*12 rows wait, 3 are lost: database or disk is full.*\(10 s\)/],
    ["smoke", (s) => Object.assign(s.smoke, { verdict: "fail", message: "equals-plain failed for DDTREE" }), /last smoke test failed: equals-plain failed/],
    ["skipped", (s) => (s.smoke_skipped = true), /without its smoke test/],
  ];
  test("each trouble is told in words and since when, over every page", async (t) => {
    const { page, faults } = await open(t, "#/nowhere");
    for (const [i, [name, change, words]] of cases.entries()) {
      await page.unrouteAll({ behavior: "ignoreErrors" });
      await changed(page, change);
      for (const hash of ["#/now", "#/history", "#/requests", "#/acceptance", "#/smoke"].slice(0, i === 2 ? 5 : 1)) {
        await page.goto(server.url + hash);
        if (hash === "#/now") await page.reload(); // asks at once
        const alert = page.getByRole("list", { name: "Alerts" }).getByRole("listitem");
        await alert.filter({ hasText: words }).waitFor();
        assert.equal(await alert.count(), 1, `${name} on ${hash}`);
      }
    }
    await page.unrouteAll({ behavior: "ignoreErrors" });
    await changed(page, (s) => cases.slice(0, 1).concat(cases.slice(2)).forEach(([, change]) => change(s)));
    for (const look of looks.slice(1, 3)) {
      await page.setViewportSize(look.viewport);
      await page.emulateMedia({ colorScheme: look.colorScheme });
      await page.goto(`${server.url}#/now`);
      await page.reload();
      await until("all alerts", async () => (await page.getByRole("list", { name: "Alerts" }).getByRole("listitem").count()) === 5);
      assert.equal(await page.locator(".rungs [aria-current=step]").innerText(), "NONE");
      await screenshot(page, `alerts-${look.name}`);
      assert.equal(await sideways(page), 0);
      assert.deepEqual(await axe(page), []);
    }
    assert.deepEqual(await faults(), []);
  });
});
