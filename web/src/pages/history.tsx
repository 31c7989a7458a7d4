import { useState } from "preact/hooks";
import { usePolled } from "../api.ts";
import { ago, clock, count, day, duration, integer, moment } from "../format.ts";
import { href, route } from "../route.ts";
import type { RunDetail, RunPage, ServiceRun } from "../types.ts";
import { Badge, Empty, Facts, LoadError, Pager, Panel, type Tone, useRowKeys } from "../ui.tsx";

const pageSize = 25;

export const stateTone = (state: ServiceRun["state"]): Tone => ({ running: "busy", stopped: "good", failed: "bad", crashed: "bad" })[state] as Tone;

function endText(run: ServiceRun): string {
  if (run.state === "running") return "running now";
  const code = run.exit_code !== null && run.exit_code >= 0 ? ` (exit ${run.exit_code})` : "";
  return `${run.end_reason || run.state}${code}`;
}

export function HistoryPage() {
  const [offset, setOffset] = useState(0);
  const list = usePolled<RunPage>(`runs?limit=${pageSize}&offset=${offset}`, 4000);
  const chosen = route.value.parts[1];
  const keys = useRowKeys();
  if (list.error && !list.data) return <LoadError error={list.error} />;
  if (!list.data) return <Empty title="Reading the history …" />;
  const { runs, total } = list.data;
  const now = Date.now();
  const open = chosen ? Number(chosen) : runs[0]?.id;
  return (
    <>
      <div class="head">
        <h1>Service history</h1>
      </div>
      {total === 0 ? (
        <Panel title="Starts">
          <Empty title="No start is recorded.">Every start, with its version, flags, memory plan, phases and end, is listed here.</Empty>
        </Panel>
      ) : (
        <>
          <Panel title="Time line" aside={<TimelineLegend />}>
            <Timeline runs={runs} now={now} chosen={open} />
          </Panel>
          <div class="columns half">
            <Panel title="Starts" flush aside="newest first">
              <div class="scroll">
                <table>
                  <thead>
                    <tr>
                      <th scope="col">Started</th>
                      <th scope="col" class="num">
                        Lasted
                      </th>
                      <th scope="col">End</th>
                      <th scope="col" class="num">
                        Requests
                      </th>
                    </tr>
                  </thead>
                  <tbody {...keys}>
                    {runs.map((run) => (
                      <tr
                        key={run.id}
                        class={`link${run.id === open ? " chosen" : ""}`}
                        onClick={() => {
                          location.hash = href(["history", run.id]);
                        }}
                      >
                        <th scope="row">
                          <a class="row-link" data-row href={href(["history", run.id])} aria-current={run.id === open ? "true" : undefined}>
                            {moment(run.started, now)}
                          </a>
                        </th>
                        <td class="num">{duration((run.ended ?? now) - run.started)}</td>
                        <td class="wrap">
                          <Badge tone={stateTone(run.state)}>{run.state}</Badge>
                        </td>
                        <td class="num">
                          {integer(run.requests)}
                          {run.errors > 0 && <span class="softer"> ({count(run.errors, "error")})</span>}
                        </td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
              <Pager offset={offset} limit={pageSize} total={total} noun="starts" go={setOffset} />
            </Panel>
            {open !== undefined && <RunPanel id={open} now={now} />}
          </div>
        </>
      )}
    </>
  );
}

function TimelineLegend() {
  return (
    <span class="legend">
      <span>
        <svg width="14" height="8" aria-hidden="true">
          <rect class="tl-start" width="14" height="8" rx="1" />
        </svg>
        starting
      </span>
      <span>
        <svg width="14" height="8" aria-hidden="true">
          <rect class="tl-up" width="14" height="8" rx="1" />
        </svg>
        serving
      </span>
      <span>
        <svg width="14" height="14" aria-hidden="true">
          <path class="tl-crash" d="M3 3l8 8M11 3l-8 8" />
        </svg>
        crashed or failed
      </span>
    </span>
  );
}

// One lane a run would waste the page: runs follow each other, so they share one lane, and only the ends are marked.
function Timeline({ runs, now, chosen }: { runs: ServiceRun[]; now: number; chosen: number | undefined }) {
  const width = 1200;
  const from = Math.min(...runs.map((r) => r.started));
  const span = Math.max(10_000, now - from);
  const x = (t: number) => 10 + ((t - from) / span) * (width - 20);
  const steps = [2e3, 5e3, 15e3, 30e3, 60e3, 300e3, 900e3, 3600e3, 3 * 3600e3, 6 * 3600e3, 12 * 3600e3, 86400e3, 2 * 86400e3, 7 * 86400e3, 30 * 86400e3];
  const step = steps.find((s) => span / s <= 9) ?? 90 * 86400e3;
  const ticks: number[] = [];
  const zone = new Date(from).getTimezoneOffset() * 60_000;
  for (let t = Math.ceil((from - zone) / step) * step + zone; t < now; t += step) ticks.push(t);
  const text = `${count(runs.length, "start")} since ${moment(from, now)}; ${count(runs.filter((r) => r.state === "crashed" || r.state === "failed").length, "crash or failure", "crashes or failures")}`;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Time line of starts">
      <svg class="timeline" viewBox={`0 0 ${width} 62`} role="img" aria-label={text}>
        {ticks.map((t) => (
          <g key={t}>
            <line class="tl-tick" x1={x(t)} x2={x(t)} y1={4} y2={40} />
            <text class="tl-text" x={x(t)} y={56}>
              {step >= 86400e3 ? day(t).slice(5) : step < 60e3 ? clock(t) : clock(t).slice(0, 5)}
            </text>
          </g>
        ))}
        <rect class="tl-bed" x={10} y={14} width={width - 20} height={16} rx={3} />
        {[...runs].reverse().map((run) => {
          const end = run.ended ?? now;
          const ready = run.ready ?? end;
          return (
            <g key={run.id} class={run.id === chosen ? "tl-run here" : "tl-run"}>
              <title>{`${moment(run.started, now)}, ${duration(end - run.started)}, ${endText(run)}`}</title>
              <rect class="tl-start" x={x(run.started)} y={14} width={Math.max(1, x(ready) - x(run.started))} height={16} />
              {run.ready && <rect class="tl-up" x={x(ready)} y={14} width={Math.max(1.5, x(end) - x(ready))} height={16} />}
              {run.id === chosen && <rect class="tl-here" x={x(run.started) - 1} y={11} width={Math.max(4, x(end) - x(run.started) + 2)} height={22} rx={3} />}
            </g>
          );
        })}
        {runs
          .filter((run) => run.state === "crashed" || run.state === "failed")
          .map((run) => (
            <g key={run.id} transform={`translate(${x(run.ended ?? now)} 22)`}>
              <circle class="tl-spot" r={8} />
              <path class="tl-crash" d="M-3.5 -3.5l7 7m0 -7l-7 7" />
            </g>
          ))}
      </svg>
    </div>
  );
}

function RunPanel({ id, now }: { id: number; now: number }) {
  const { data: run, error } = usePolled<RunDetail>(`runs/${id}`, 4000);
  if (error && !run) return <LoadError error={error} />;
  if (!run || run.id !== id)
    return (
      <Panel title="Start">
        <Empty title="Reading …" />
      </Panel>
    );
  return (
    <div class="stack">
      <Panel title={`Started ${day(run.started)} ${clock(run.started)}`} aside={<Badge tone={stateTone(run.state)}>{run.state}</Badge>}>
        <Facts
          items={[
            ["End", run.state === "running" ? "running now" : `${endText(run)}, ${ago(run.ended ?? run.started, now)}`],
            ["Ready after", run.ready ? duration(run.ready - run.started) : "never"],
            ["Smoke test", run.smoke ? <Badge tone={run.smoke === "pass" ? "good" : run.smoke === "fail" ? "bad" : "warn"}>{run.smoke}</Badge> : "not run"],
            ["Version", run.version],
            ["Host", `${run.host}, pid ${run.pid}`],
            ["Mode", run.mode],
            ["Model", run.model],
            ["Drafter", run.drafter || "none"],
            ["Requests", <a href={href(["requests"], { run: run.id })}>{count(run.requests, "request")}</a>],
          ]}
        />
      </Panel>
      <Panel title="Phases">
        {run.phases.length ? <Phases run={run} /> : <Empty title="No phase is recorded." />}
      </Panel>
      <Panel title="Flags">
        <Flags flags={run.flags} />
      </Panel>
      {run.plan != null && (
        <Panel title="Memory plan">
          <Recorded value={run.plan} />
        </Panel>
      )}
      {run.devices != null && (
        <Panel title="Devices">
          <Recorded value={run.devices} />
        </Panel>
      )}
    </div>
  );
}

function Phases({ run }: { run: RunDetail }) {
  // Serving lasts hours and starting seconds: the bars compare the start-up phases, serving has its own figure only.
  const serving = (name: string) => name === "ready" || name === "degraded";
  const most = Math.max(1, ...run.phases.filter((p) => !serving(p.phase)).map((p) => p.lasted_ms));
  return (
    <div class="gantt" role="list" aria-label="Phases with their durations">
      {run.phases.map((phase, i) => (
        <div class="bar-row" role="listitem" key={i}>
          <span>{phase.phase}</span>
          <span class="soft small">
            {!serving(phase.phase) && phase.phase !== "stopped" && phase.phase !== "failed" ? (
              <svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">
                <rect class="bed" width="100" height="12" />
                <rect width={Math.max(0.4, (phase.lasted_ms / most) * 100)} height="12" />
              </svg>
            ) : (
              phase.reason
            )}
          </span>
          <span class="value">{phase.phase === "stopped" || phase.phase === "failed" ? clock(phase.at) : duration(phase.lasted_ms)}</span>
        </div>
      ))}
    </div>
  );
}

// Flags are recorded as pairs or as a map; both are shown one a line.
function Flags({ flags }: { flags: unknown }) {
  const pairs = Array.isArray(flags) ? flags : flags && typeof flags === "object" ? Object.entries(flags) : [];
  const lines = pairs.map((pair) => (Array.isArray(pair) ? pair.filter((p) => p !== "" && p !== true).map(String).join(" ") : String(pair)));
  if (lines.length === 0) return <Empty title="No flags were given.">Everything ran by its default.</Empty>;
  return <div class="flags">{lines.join("\n")}</div>;
}

// What a run recorded of itself, whatever its shape: lists of records become tables, records become lines.
function Recorded({ value }: { value: unknown }) {
  if (Array.isArray(value) && value.every((v) => v && typeof v === "object" && !Array.isArray(v)) && value.length > 0) {
    const names = [...new Set(value.flatMap((v) => Object.keys(v as object)))];
    return (
      <div class="scroll" tabIndex={0} role="region" aria-label="Recorded table">
        <table>
          <thead>
            <tr>
              {names.map((name) => (
                <th key={name} scope="col" class={value.some((v) => typeof (v as Record<string, unknown>)[name] === "number") ? "num" : ""}>
                  {name.replace(/_/g, " ")}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {value.map((v, i) => (
              <tr key={i}>
                {names.map((name) => {
                  const cell = (v as Record<string, unknown>)[name];
                  return (
                    <td key={name} class={typeof cell === "number" ? "num" : ""}>
                      {plain(cell)}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    );
  }
  if (value && typeof value === "object" && !Array.isArray(value)) {
    const entries = Object.entries(value);
    const simple = entries.filter(([, v]) => v === null || typeof v !== "object");
    const deep = entries.filter(([, v]) => v !== null && typeof v === "object");
    if (entries.length === 0) return <p class="soft">none</p>;
    return (
      <>
        {simple.length > 0 && <Facts items={simple.map(([k, v]) => [k.replace(/_/g, " "), plain(v)])} />}
        {deep.map(([k, v]) => (
          <div key={k}>
            <h3>{k.replace(/_/g, " ")}</h3>
            <Recorded value={v} />
          </div>
        ))}
      </>
    );
  }
  return <p>{Array.isArray(value) ? value.map(plain).join(", ") : plain(value)}</p>;
}

function plain(value: unknown): string {
  if (typeof value === "number") return Number.isInteger(value) ? integer(value) : value.toFixed(2);
  return value == null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
}
