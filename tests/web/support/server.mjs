// Starts the real executable with the embedded pair on a free loopback port, and talks to it.
import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

// The tests' executable with faults on demand: `serve --inject …`.
export const faultyBinary = resolve(process.env.DDTREE_INJECT_BIN ?? new URL("../../../build/ddtree-inject", import.meta.url).pathname);
const binary = resolve(process.env.DDTREE_BIN ?? new URL("../../../build/ddtree", import.meta.url).pathname);

export function temporaryFolder() {
  const path = mkdtempSync(join(tmpdir(), "ddtree-web-"));
  return { path, remove: () => rmSync(path, { recursive: true, force: true }) };
}

function freePort() {
  return new Promise((done, fail) => {
    const probe = createServer();
    probe.once("error", fail);
    probe.listen(0, "127.0.0.1", () => {
      const { port } = probe.address();
      probe.close(() => done(port));
    });
  });
}

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// Waits until `condition` gives something true; the error says what was waited for.
export async function until(what, condition, ms = 20_000) {
  const end = performance.now() + ms;
  let last;
  for (;;) {
    try {
      last = await condition();
      if (last) return last;
    } catch (error) {
      last = error;
    }
    if (performance.now() > end) throw new Error(`waited ${ms} ms for ${what}; last: ${last instanceof Error ? last.message : JSON.stringify(last)}`);
    await sleep(100);
  }
}

// {url, api(path), chat(body), stop(signal)}; ready when this returns. `port` re-uses an address (a restart).
export async function startServer({ db, flags = [], key = "", port = 0, program = binary }) {
  if (!existsSync(program)) throw new Error(`${program} is not there: ./dev build and ./dev test make it, or DDTREE_BIN and DDTREE_INJECT_BIN name another`);
  port ||= await freePort();
  const child = spawn(program, ["serve", "--host", "127.0.0.1", "--port", String(port), "--db", db, ...(key ? ["--api-key", key] : []), ...flags], { stdio: ["ignore", "pipe", "pipe"] });
  let log = "";
  child.stdout.on("data", (d) => (log += d));
  child.stderr.on("data", (d) => (log += d));
  const ended = new Promise((done) => child.once("exit", (code, signal) => done({ code, signal })));
  let over = false;
  void ended.then(() => (over = true));
  const url = `http://127.0.0.1:${port}/`;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  await until("the server to be ready", async () => {
    if (over) throw new Error(`ddtree ended:\n${log}`);
    return (await fetch(`${url}readyz`)).ok;
  }, 180_000).catch((error) => {
    child.kill("SIGKILL");
    throw new Error(`${error.message}\n${log}`);
  });
  return {
    url,
    port,
    log: () => log,
    async api(path, init) {
      const reply = await fetch(`${url}admin/api/${path}`, { headers, ...init });
      if (!reply.ok) throw new Error(`${path}: ${reply.status} ${await reply.text()}`);
      return reply.json();
    },
    async post(path, body) {
      const reply = await fetch(url + path, { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) });
      return { status: reply.status, body: await reply.json() };
    },
    // Ends the process; "SIGKILL" is a crash.
    async stop(signal = "SIGTERM") {
      if (!over) child.kill(signal);
      const timer = setTimeout(() => child.kill("SIGKILL"), 30_000);
      const how = await ended;
      clearTimeout(timer);
      return how;
    },
  };
}
