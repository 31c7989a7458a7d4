import { useState } from "preact/hooks";
import { usePolled } from "../api.ts";
import { ago, clock, count, day, duration, integer, moment } from "../format.ts";
import { PlanTable, isMemoryPlan } from "../plan.tsx";
import { href, route } from "../route.ts";
import { Timeline, TimelineLegend, isLadder } from "../timeline.tsx";
import type { EventPage, RunDetail, ServiceRun, Timeline as TimelineData } from "../types.ts";
import { Badge, Empty, EventList, Facts, LoadError, Pager, Panel, type Tone, useRowKeys } from "../ui.tsx";

const pageSize = 25;

export const stateTone = (state: ServiceRun["state"]): Tone => ({ running: "busy", stopped: "good", failed: "bad", crashed: "bad" })[state] as Tone;

function endText(run: ServiceRun): string {
  if (run.state === "running") return "running now";
  const code = run.exit_code !== null && run.exit_code >= 0 ? ` (exit ${run.exit_code})` : "";
  return `${run.end_reason || run.state}${code}`;
}

export function HistoryPage() {
  const [offset, setOffset] = useState(0);
  const [picked, setPicked] = useState<number[]>([]);
  const list = usePolled<TimelineData>(`timeline?limit=${pageSize}&offset=${offset}`, 4000);
  const chosen = route.value.parts[1];
  const keys = useRowKeys();
  if (list.error && !list.data) return <LoadError error={list.error} />;
  if (!list.data) return <Empty title="Reading the history …" />;
  const { runs, total, events_left_out } = list.data;
  // The last two that were chosen: a third takes the place of the first.
  const pick = (id: number) => setPicked((old) => (old.includes(id) ? old.filter((p) => p !== id) : [...old, id].slice(-2)));
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
            <Timeline runs={runs} now={now} chosen={open} label="Time line of starts" />
            {events_left_out > 0 && <p class="small softer">{count(events_left_out, "older event")} without a mark.</p>}
          </Panel>
          <div class="columns half">
            <Panel title="Starts" flush aside={<CompareLink picked={picked} path={["history", "compare"]} noun="starts" />}>
              <div class="scroll">
                <table>
                  <thead>
                    <tr>
                      <th scope="col">
                        <span class="visually-hidden">Compare</span>
                      </th>
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
                        <td class="pick" onClick={(event) => event.stopPropagation()}>
                          <input type="checkbox" checked={picked.includes(run.id)} onChange={() => pick(run.id)} aria-label={`Compare the start of ${moment(run.started, now)}`} />
                        </td>
                        <th scope="row">
                          <a class="row-link" data-row href={href(["history", run.id])} aria-current={run.id === open ? "true" : undefined}>
                            {moment(run.started, now)}
                          </a>
                        </th>
                        <td class="num">{duration((run.ended ?? now) - run.started)}</td>
                        <td class="wrap">
                          <Badge tone={stateTone(run.state)}>{run.state}</Badge>
                          <span class="softer small"> {run.version}</span>
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
            {open !== undefined && <RunPanel id={open} now={now} inLine={runs.find((run) => run.id === open)} />}
          </div>
        </>
      )}
    </>
  );
}

// Two or more rows that were chosen, as a link to where they stand side by side.
export function CompareLink({ picked, path, noun }: { picked: number[]; path: string[]; noun: string }) {
  if (picked.length < 2) return <span>choose two {noun} to compare</span>;
  return <a href={href(path, { ids: picked.join(",") })}>Compare {picked.length} {noun}</a>;
}

function RunPanel({ id, now, inLine }: { id: number; now: number; inLine: TimelineData["runs"][number] | undefined }) {
  const { data: run, error } = usePolled<RunDetail>(`runs/${id}`, 4000);
  const events = usePolled<EventPage>(`events?run=${id}&limit=50`, 4000).data;
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
      {inLine && (
        <Panel title="This start alone">
          <Timeline runs={[inLine]} now={now} label="Time line of this start" width={620} />
          {!inLine.events.some(isLadder) && <p class="small softer">The fault ladder stayed at its top step.</p>}
        </Panel>
      )}
      <Panel title="Phases">
        {run.phases.length ? <Phases run={run} /> : <Empty title="No phase is recorded." />}
      </Panel>
      <Panel title="Events" flush aside={events && events.total > events.events.length ? `newest ${events.events.length} of ${integer(events.total)}` : undefined}>
        {events?.events.length ? <EventList events={events.events} now={now} /> : <Empty title="No events.">Steps of the fault ladder, suspicious streams, stuck rounds, canaries and refused writes are told here.</Empty>}
      </Panel>
      <Panel title="Flags">
        <Flags flags={run.flags} />
      </Panel>
      {run.plan != null && (
        <Panel title="Memory plan">
          {isMemoryPlan(run.plan) ? <PlanTable plan={run.plan} /> : <Recorded value={run.plan} />}
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
