// Every page of the dashboard over a real server: is what it shows what the API says, in light and dark, on a phone's width, by keyboard,
// for axe, under its policy, and with text that would like to be HTML.
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { axe, launch, looks, openPage, screenshot, sideways } from "./support/browser.mjs";
import { startServer, temporaryFolder, until } from "./support/server.mjs";

const hostile = `<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>`;
const code = "Write a Python function gcd(a, b). Return only code.";

let browser, server, folder, greedy;

async function chat(on, content, more = {}) {
  const { status, body } = await on.post("v1/chat/completions", { messages: [{ role: "user", content }], temperature: 0, chat_template_kwargs: { enable_thinking: false }, ...more });
  return { status, ...body };
}

before(async () => {
  folder = temporaryFolder();
  browser = await launch();
  // Two lives: the first one crashes, so that the history has something to tell.
  const first = await startServer({ db: `${folder.path}/web.db`, flags: ["--store-text"] });
  await chat(first, "Say hello to Carol.");
  await until("the request to be kept", async () => (await first.api("requests")).total === 1);
  await first.stop("SIGKILL");

  server = await startServer({ db: `${folder.path}/web.db`, flags: ["--store-text"] });
  greedy = await chat(server, code, { max_tokens: 200 });
  assert.equal(greedy.status, 200);
  await chat(server, hostile, { max_tokens: 40, ignore_eos: true });
  await chat(server, "Tell me a short story about a mouse.", { temperature: 0.8, seed: 7, max_tokens: 120 });
  const short = await chat(server, code, { max_tokens: 5 });
  assert.equal(short.choices[0].finish_reason, "length");
  // More than a page of the table.
  for (let i = 0; i < 12; ++i) await Promise.all([0, 1, 2, 3].map((k) => chat(server, `Say hello to ${"ABCD"[k]}${i}.`, { max_tokens: 1 + ((i + k) % 4) })));
  await until("all requests to be kept", async () => (await server.api("requests")).total === 1 + 4 + 48);
});
after(async () => {
  await browser?.close();
  await server?.stop();
  folder?.remove();
});

const pagesOf = () => ({ now: "#/now", history: "#/history", requests: "#/requests", request: `#/requests/${greedy.id}?round=2`, smoke: "#/smoke", nowhere: "#/nowhere" });
// Something that is only there once the page has its data.
const settled = { now: ".bars", history: ".gantt", requests: "tbody tr.link", request: ".tree .node", smoke: ".check", nowhere: ".empty" };

async function open(t, hash, look, allow) {
  const opened = await openPage(browser, server.url + hash, look, allow);
  t.after(async () => opened.close());
  return opened;
}

describe("looks", () => {
  for (const look of looks)
    test(`every page in ${look.name}: no fault, no sideways scroll, nothing for axe`, async (t) => {
      const { page, faults } = await open(t, "", look);
      for (const [name, hash] of Object.entries(pagesOf())) {
        await page.goto(server.url + hash);
        await page.waitForSelector(settled[name]);
        if (name === "now") await page.waitForSelector(".u-over");
        await screenshot(page, `${name}-${look.name}`);
        assert.equal(await sideways(page), 0, `${name} scrolls sideways`);
        assert.deepEqual(await axe(page), [], `axe on ${name}`);
      }
      assert.deepEqual(await faults(), []);
    });

  test("empty states say what will appear", async (t) => {
    const { page, faults } = await open(t, "#/nowhere");
    const nothing = { "**/admin/api/timeline?*": { total: 0, offset: 0, limit: 25, runs: [], events_left_out: 0 }, "**/admin/api/requests?*": { total: 0, offset: 0, limit: 50, requests: [] }, "**/admin/api/smoke?*": { total: 0, offset: 0, limit: 20, running: null, runs: [] }, "**/admin/api/events?*": { total: 0, events: [] }, "**/admin/api/series?*": { from: 0, to: 3600e3, time: [], decode_tps: [], prefill_tps: [], tokens_per_round: [], running: [] } };
    for (const [pattern, body] of Object.entries(nothing)) await page.route(pattern, (r) => r.fulfill({ json: body }));
    for (const [hash, words] of [["#/now", "Nothing measured yet"], ["#/now", "No events."], ["#/history", "No start is recorded"], ["#/requests", "No request has finished yet"], ["#/smoke", "No smoke test has run"]]) {
      await page.goto(server.url + hash);
      const empty = page.locator(".empty", { hasText: words });
      await empty.waitFor();
      assert.ok((await empty.innerText()).length > words.length + 20, `${hash} only says ${words}`);
      await screenshot(page, `empty-${hash.slice(2)}`);
      assert.deepEqual(await axe(page), []);
    }
    assert.deepEqual(await faults(), []);
  });

  test("the toggle changes the colours and is remembered", async (t) => {
    const { page } = await open(t, "#/now");
    const ground = () => page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
    const light = await ground();
    await page.getByRole("button", { name: "Switch to dark colours" }).click();
    const dark = await ground();
    assert.notEqual(dark, light);
    await page.reload();
    await page.getByRole("button", { name: "Switch to light colours" }).waitFor();
    assert.equal(await ground(), dark);
    await page.getByRole("button", { name: "Switch to light colours" }).click();
    assert.equal(await ground(), light);
  });
});

const figure = (page, name) => page.locator(".stats > div", { has: page.locator("dt", { hasText: new RegExp(`^${name}$`) }) }).locator("dd");

describe("data", () => {
  test("now: phase, model, mode, counters and acceptance are the API's", async (t) => {
    const { page, faults } = await open(t, "#/now");
    await page.waitForSelector(".bars");
    const s = await server.api("status");
    assert.equal(s.phase.word, "ready");
    assert.ok((await page.locator("h1").innerText()).includes(s.phase.sentence));
    const head = await page.locator(".head").innerText();
    for (const part of [s.model.name, s.engine.mode, "Ready since", "Smoke test passed"]) assert.ok(head.includes(part), `${part} is not in: ${head}`);
    // 52 of this life; the smoke suite's own are no client's.
    assert.equal(s.engine.finished, 52);
    assert.equal(await figure(page, "Finished").evaluate((e) => e.firstChild.textContent), String(s.engine.finished));
    assert.ok((await figure(page, "Pages").innerText()).includes(`of ${s.engine.pages_total}`));
    const bars = page.getByRole("list", { name: "Acceptance by position" }).getByRole("listitem");
    const shown = (await bars.locator(".value").allInnerTexts()).map((v) => parseFloat(v.replace("<", "")) || 0);
    const rates = s.engine.accepted_at.map((n) => (100 * n) / s.engine.rounds);
    assert.ok(shown.length > 0 && shown.length <= rates.length);
    shown.forEach((v, i) => assert.ok(Math.abs(v - rates[i]) <= 0.5, `position ${i + 1}: ${v} % shown, ${rates[i]} %`));
    const counts = (await page.getByRole("list", { name: "Rounds by accepted tokens" }).locator(".value").allInnerTexts()).map((v) => Number(v.replace(/\D/g, "")));
    assert.equal(counts.reduce((a, b) => a + b), s.engine.rounds);
    assert.deepEqual(await faults(), []);
  });

  test("now: a running request appears while it runs, and the speed moves", async (t) => {
    const { page } = await open(t, "#/now");
    await page.getByText("Idle.").waitFor();
    // The pair is quick and the page asks every second: requests go on until one was seen.
    let seen = false;
    const answers = (async () => {
      const statuses = [];
      do statuses.push((await chat(server, "Tell me a long story about a mouse.", { max_tokens: 1200, ignore_eos: true, temperature: 1, seed: 3 })).status);
      while (!seen);
      return statuses;
    })();
    const rows = page.getByRole("region", { name: "Running and waiting requests" }).locator("tbody tr");
    await until("a running row", async () => /DDTREE/.test((await rows.allInnerTexts()).join())).finally(() => (seen = true));
    assert.deepEqual([...new Set(await answers)], [200]);
    await page.getByText("Idle.").waitFor();
    await until("the chart to have the run", async () => Math.max(...(await server.api("series")).decode_tps) > 0);
    const series = await server.api("series");
    assert.equal(series.time.length, series.decode_tps.length);
    assert.ok(series.time.every((x, i) => i === 0 || x > series.time[i - 1]), "times of the chart do not rise");
  });

  test("history: both lives, the crash, phases and flags", async (t) => {
    const { page, faults } = await open(t, "#/history");
    const { runs, total } = await server.api("runs");
    assert.equal(total, 2);
    assert.deepEqual(runs.map((r) => r.state), ["running", "crashed"]);
    const rows = page.locator("tbody tr.link");
    await rows.nth(1).waitFor();
    assert.equal(await rows.count(), 2);
    assert.match(await rows.nth(1).innerText(), /crashed/);
    assert.equal(await page.locator(".tl-spot").count(), 1);
    const detail = await server.api(`runs/${runs[0].id}`);
    await page.locator(".gantt").waitFor();
    const names = await page.locator(".gantt .bar-row > span:first-child").allInnerTexts();
    assert.deepEqual(names, detail.phases.map((p) => p.phase));
    assert.ok(names.includes("weights") && names.includes("smoke") && names.at(-1) === "ready", names.join());
    assert.match(await page.locator(".flags").innerText(), /--store-text/);
    assert.equal(detail.mode, "DDTREE");
    assert.ok(detail.drafter, "the drafter is not recorded");
    const facts = await page.locator(".facts").first().innerText();
    for (const part of [detail.version, `pid ${detail.pid}`, "DDTREE", detail.drafter]) assert.ok(facts.includes(part), `${part} is not in ${facts}`);
    await rows.nth(1).click();
    await page.locator(".facts dd").filter({ hasText: "ended without notice" }).waitFor();
    assert.deepEqual(await faults(), []);
  });

  test("requests: rows, filter, sort, paging and export are the API's", async (t) => {
    const { page, faults } = await open(t, "#/requests");
    const rows = page.locator("tbody tr.link");
    await rows.first().waitFor();
    const cells = async () => Promise.all((await rows.all()).map(async (r) => (await r.locator("td").allInnerTexts()).map((c) => c.trim())));
    const expect = (r) => ({ prompt: String(r.prompt_tokens), generated: String(r.completion_tokens), rounds: String(r.rounds), mean: r.tokens_per_round === null ? "–" : r.tokens_per_round.toFixed(2), finish: r.finish });
    const shown = async () => (await cells()).map((c) => ({ prompt: c[2], generated: c[3], rounds: c[8], mean: c[9], finish: c[10] }));
    const same = async (query, what) => {
      const { requests } = await server.api(`requests?limit=50&${query}`);
      await until(what, async () => JSON.stringify(await shown()) === JSON.stringify(requests.map(expect)));
      return requests;
    };
    const all = await same("", "the table to be the API's");
    assert.equal(all.length, 50);
    await page.getByRole("button", { name: "Next" }).click();
    const rest = await same("offset=50", "the second page");
    assert.ok(rest.length > 0 && !all.some((r) => rest.some((q) => q.id === r.id)), "the pages overlap");
    await page.getByRole("button", { name: "Previous" }).click();
    await same("", "the first page again");

    await page.getByLabel("Finish").selectOption("length");
    const cut = await same("finish=length", "the filter");
    assert.ok(cut.length > 0 && cut.every((r) => r.finish === "length"));
    assert.match(page.url(), /finish=length/);
    await page.getByRole("button", { name: "Clear" }).click();

    await page.getByRole("button", { name: "Generated" }).click();
    const sorted = await same("sort=tokens", "the order by tokens");
    assert.ok(sorted.every((r, i) => i === 0 || r.completion_tokens <= sorted[i - 1].completion_tokens), "not by falling tokens");
    assert.equal(await page.locator("th[aria-sort]").innerText().then((s) => s.trim()), "Generated ↓");

    const { total } = await server.api("requests?limit=1");
    const save = async (name) => {
      const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name }).click()]);
      const chunks = [];
      for await (const c of await file.createReadStream()) chunks.push(c);
      return Buffer.concat(chunks).toString("utf8");
    };
    const json = JSON.parse(await save("Export JSON"));
    assert.equal(json.length, total);
    assert.equal(json[0].completion_tokens, sorted[0].completion_tokens);
    const csv = (await save("Export CSV")).trimEnd().split("\r\n");
    assert.equal(csv.length, total + 1);
    assert.ok(csv[0].startsWith("id,run_id,received"));
    assert.deepEqual(await faults(), []);
  });

  test("a request: figures, text and every round's tree are the API's", async (t) => {
    const { page, faults } = await open(t, `#/requests/${greedy.id}`);
    const r = await server.api(`requests/${greedy.id}`);
    const { rounds, texts, total } = await server.api(`requests/${greedy.id}/rounds?limit=1000`);
    assert.equal(total, r.rounds);
    assert.equal(rounds.length, r.rounds);
    assert.ok(r.accepted > 0 && rounds.some((x) => x.next >= 0), "nothing to draw");
    const accepted = (x) => x.accepted.slice(1).filter(Boolean).length;
    assert.equal(rounds.reduce((n, x) => n + accepted(x), 0), r.accepted);
    assert.equal(r.completion_tokens, greedy.usage.completion_tokens);
    await page.waitForSelector(".tree .node");
    assert.equal(await figure(page, "Rounds").innerText(), String(r.rounds));

    // The rounds' text is the answer (and its closing token, which the reply hides).
    const written = await page.getByRole("region", { name: "The answer by rounds" }).evaluate((e) => e.textContent);
    assert.ok(written.startsWith(greedy.choices[0].message.content), `${JSON.stringify(written)}\n${JSON.stringify(greedy.choices[0].message.content)}`);

    const label = (text) => text.replace(/ /g, "·").replace(/\n/g, "↵");
    for (const [i, round] of rounds.entries()) {
      const tree = page.getByRole("tree", { name: `Draft tree of round ${i + 1}`, exact: true });
      await tree.waitFor();
      assert.equal(await tree.locator(".node").count(), round.parent.length + (round.next >= 0 ? 1 : 0));
      assert.equal(await tree.locator(".node.taken").count(), accepted(round));
      assert.equal(await tree.locator(".node.own").count(), round.next >= 0 ? 1 : 0);
      if (round.next >= 0 && texts[round.next].length < 15) assert.equal(await tree.locator(".node.own text").textContent(), label(texts[round.next]));
      // Boxes do not overlap, and what the round wrote lies on the first line.
      const clash = await tree.evaluate((e) => {
        const boxes = [...e.querySelectorAll(".node .pill")].map((p) => p.getBoundingClientRect());
        for (let a = 0; a < boxes.length; ++a)
          for (let b = a + 1; b < boxes.length; ++b)
            if (boxes[a].left < boxes[b].right && boxes[b].left < boxes[a].right && boxes[a].top < boxes[b].bottom && boxes[b].top < boxes[a].bottom) return `${a} and ${b}`;
        const tops = [...e.querySelectorAll(".node.taken, .node.own, .node.root")].map((p) => p.getBoundingClientRect().top);
        return new Set(tops.map(Math.round)).size === 1 ? "" : "the taken path is not on one line";
      });
      assert.equal(clash, "", `round ${i + 1}`);
      await tree.press("]");
    }
    assert.deepEqual(await faults(), []);
  });

  test("smoke tests: the checks are the API's, and one can be run now", async (t) => {
    const { page, faults } = await open(t, "#/smoke");
    await page.waitForSelector(".check");
    const before = await server.api("smoke");
    assert.equal(before.runs[0].verdict, "pass");
    assert.equal(await page.locator(".check").count(), before.runs[0].checks.length);
    const outputs = before.runs[0].checks.filter((c) => c.output).map((c) => c.output);
    assert.ok(outputs.length > 0);
    assert.deepEqual(await page.locator(".check .output").evaluateAll((l) => l.map((e) => e.textContent)), outputs);
    await page.getByRole("button", { name: "Run now" }).click();
    await page.getByRole("button", { name: "Running …" }).waitFor();
    const now = await until("the new run", async () => {
      const list = await server.api("smoke");
      return list.total === before.total + 1 && list;
    }, 120_000);
    assert.equal(now.runs[0].trigger, "dashboard");
    assert.equal(now.runs[0].verdict, "pass");
    await page.getByRole("button", { name: "Run now" }).waitFor();
    await until("the row of the new run", async () => (await page.locator("tbody tr").count()) === now.total);
    assert.match(await page.locator("tbody tr").first().innerText(), /dashboard/);
    assert.deepEqual(await faults(), []);
  });
});

describe("keyboard", () => {
  test("skip link, tabs, rows, tree and rounds work without a mouse", async (t) => {
    const { page, faults } = await open(t, "#/requests");
    await page.locator("tbody tr.link").nth(2).waitFor();
    const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.textContent.trim());
    await page.keyboard.press("Tab");
    assert.equal(await focused(), "Skip to content");
    const box = await page.locator(".skip").boundingBox();
    assert.ok(box.y >= 0, "the skip link stays hidden");
    await page.keyboard.press("Enter");
    assert.equal(await focused(), "main");
    const ring = async () => page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
    const first = page.locator("[data-row]").first();
    for (let i = 0; i < 40 && !(await first.evaluate((e) => e === document.activeElement)); ++i) await page.keyboard.press("Tab");
    assert.ok(await first.evaluate((e) => e === document.activeElement), "Tab does not reach the table");
    assert.notEqual(await ring(), "none", "no visible focus");
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("ArrowUp");
    assert.ok(await page.locator("[data-row]").nth(1).evaluate((e) => e === document.activeElement), "arrows do not walk the rows");
    const target = await page.locator("[data-row]").nth(1).getAttribute("href");
    await page.keyboard.press("Enter");
    await until("the request's page", async () => page.url().endsWith(target));
    await until("the new page has the focus", async () => (await focused()) === "main");  // after it is drawn, not with the address

    await page.goto(`${server.url}#/requests/${greedy.id}`);
    const tree = page.getByRole("tree");
    await tree.focus();
    const active = () => tree.evaluate((e) => document.getElementById(e.getAttribute("aria-activedescendant")).getAttribute("aria-label"));
    await page.keyboard.press("Home");
    assert.match(await active(), /anchor/);
    await page.keyboard.press("ArrowRight");
    const { rounds } = await server.api(`requests/${greedy.id}/rounds`);
    assert.match(await active(), rounds[0].accepted.slice(1).some(Boolean) ? /accepted/ : /own choice/);
    assert.equal(await tree.locator(".node.here").count(), 1);
    await page.keyboard.press("ArrowLeft");
    assert.match(await active(), /anchor/);
    await page.keyboard.press("End");
    assert.match(await active(), rounds[0].next >= 0 ? /own choice/ : /accepted/);
    await page.keyboard.press("]");
    await page.getByRole("tree", { name: "Draft tree of round 2" }).waitFor();
    await page.keyboard.press("[");
    await page.getByRole("tree", { name: "Draft tree of round 1" }).waitFor();
    const slider = page.getByRole("slider", { name: "Round" });
    await slider.focus();
    await page.keyboard.press("End");
    assert.equal(await slider.getAttribute("aria-valuenow"), String(rounds.length));
    assert.deepEqual(await faults(), []);
  });
});

describe("hostile text", () => {
  test("prompts are shown as text", async (t) => {
    const { requests } = await server.api("requests?limit=1000");
    const details = await Promise.all(requests.filter((r) => r.run_id === requests[0].run_id).map((r) => server.api(`requests/${r.id}`)));
    const one = details.find((d) => d.prompt_text?.includes("onerror"));
    assert.ok(one, "the prompt was not kept");
    const { page, faults } = await open(t, `#/requests/${one.id}`);
    const prompt = page.getByRole("region", { name: "Prompt text" });
    await prompt.waitFor();
    assert.equal(await prompt.evaluate((e) => e.textContent), one.prompt_text);
    assert.equal(await page.locator("#app img, #app script").count(), 0);
    assert.doesNotMatch(await page.title(), /owned/);
    assert.deepEqual(await faults(), []);
  });

  // A model cannot be made to write it on demand, so the reply is changed on its way.
  test("tokens, errors, clients and events are shown as text", async (t) => {
    const { page, faults } = await open(t, "#/nowhere");
    await page.route("**/rounds?*", async (route) => {
      const body = await (await route.fetch()).json();
      for (const id of Object.keys(body.texts)) body.texts[id] = hostile;
      await route.fulfill({ json: body });
    });
    await page.route(`**/requests/${greedy.id}`, async (route) => {
      const body = await (await route.fetch()).json();
      await route.fulfill({ json: { ...body, error: hostile, client: hostile, model: hostile, answer_text: hostile } });
    });
    await page.route("**/admin/api/events?*", (route) => route.fulfill({ json: { total: 1, events: [{ id: 1, run_id: 1, time: Date.now(), severity: "error", kind: hostile, message: hostile, detail: null }] } }));
    await page.goto(`${server.url}#/requests/${greedy.id}`);
    await page.waitForSelector(".tree .node");
    assert.ok((await page.getByRole("region", { name: "The answer by rounds" }).evaluate((e) => e.textContent)).includes(hostile));
    assert.equal(await page.locator(".bad-text").textContent(), hostile);
    await screenshot(page, "hostile-request");
    assert.equal(await sideways(page), 0);
    await page.goto(`${server.url}#/now`);
    assert.ok((await page.locator(".events .text").textContent()).includes(hostile));
    assert.equal(await page.locator("#app img, #app script").count(), 0);
    assert.doesNotMatch(await page.title(), /owned/);
    assert.deepEqual(await faults(), []);
  });
});

describe("the wire", () => {
  test("page and data carry the policy; assets are immutable, the page is revalidated", async () => {
    const page = await fetch(server.url);
    assert.match(page.headers.get("content-type"), /^text\/html/);
    for (const reply of [page, await fetch(`${server.url}admin/api/status`)]) {
      const policy = reply.headers.get("content-security-policy");
      for (const part of ["default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"]) assert.ok(policy.includes(part), `${part} is not in ${policy}`);
      assert.equal(reply.headers.get("x-content-type-options"), "nosniff");
    }
    const html = await page.text();
    assert.doesNotMatch(html, /<script(?![^>]*src=)[^>]*>|<style|style=|https?:\/\//);
    const assets = [...html.matchAll(/(?:src|href)="\.\/(assets\/[^"]+)"/g)].map((m) => m[1]);
    assert.ok(assets.length >= 2);
    for (const name of assets) {
      const asset = await fetch(server.url + name);
      assert.equal(asset.status, 200);
      assert.match(asset.headers.get("cache-control"), /immutable/);
      assert.match(asset.headers.get("content-type"), name.endsWith(".js") ? /javascript/ : /css/);
    }
    assert.equal(page.headers.get("cache-control"), "no-cache");
    const again = await fetch(server.url, { headers: { "If-None-Match": page.headers.get("etag") } });
    assert.equal(again.status, 304);
    assert.equal((await fetch(`${server.url}assets/nothing.js`)).status, 404);
    const away = await fetch(`${server.url}admin`, { redirect: "manual" });
    assert.equal(away.headers.get("location"), "/");
  });

  test("another site cannot start a smoke test", async () => {
    const { total } = await server.api("smoke?limit=1");
    const run = `${server.url}admin/api/smoke/run`;
    assert.equal((await fetch(run, { method: "POST", body: "{}", headers: { "Content-Type": "text/plain" } })).status, 415);
    assert.equal((await fetch(run, { method: "POST" })).status, 415);
    // fetch() may not set Sec-Fetch-Site itself.
    const { request } = await import("node:http");
    const status = await new Promise((done, fail) => {
      const r = request(run, { method: "POST", headers: { "Content-Type": "application/json", "Sec-Fetch-Site": "cross-site", "Content-Length": 2 } }, (reply) => {
        reply.resume();
        done(reply.statusCode);
      });
      r.on("error", fail);
      r.end("{}");
    });
    assert.equal(status, 403);
    assert.equal((await server.api("smoke?limit=1")).total, total);
  });

  test("wrong parameters are a 400 that names them; unknown things a 404", async () => {
    for (const [path, param] of [["requests?finish=never", "finish"], ["requests?mode=FAST", "mode"], ["requests?limit=0", "limit"], ["requests?offset=-1", "offset"], ["requests?sort=size", "sort"], ["requests?error=maybe", "error"], ["series?minutes=x", "minutes"], ["requests/export?format=xml", "format"], ["events?severity=loud", "severity"]]) {
      const reply = await fetch(`${server.url}admin/api/${path}`);
      assert.equal(reply.status, 400, path);
      const { error } = await reply.json();
      assert.equal(error.param, param);
      assert.ok(error.message.includes(param) && error.message.includes("must be"), error.message);
    }
    for (const path of ["requests/chatcmpl-none", "runs/999", "runs/x", "smoke/999", "nothing"]) assert.equal((await fetch(`${server.url}admin/api/${path}`)).status, 404, path);
  });

  test("a request without kept ids still shows its shape", async (t) => {
    const { page, faults } = await open(t, "#/nowhere");
    await page.route("**/rounds?*", async (route) => {
      const body = await (await route.fetch()).json();
      await route.fulfill({ json: { ...body, texts: {}, rounds: body.rounds.map((r) => ({ ...r, token: null, next: null })) } });
    });
    await page.goto(`${server.url}#/requests/${greedy.id}`);
    await page.waitForSelector(".tree .node");
    await page.getByText("Token texts are not written").waitFor();
    await screenshot(page, "request-without-ids");
    assert.deepEqual(await axe(page), []);
    assert.deepEqual(await faults(), []);
  });
});
