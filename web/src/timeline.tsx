// Time lines: starts with their phases, marks of events, and the fault ladder as a step line.
import { clock, count, day, duration, moment } from "./format.ts";
import type { ServiceEvent, TimelineRun } from "./types.ts";

const starting = ["starting", "devices", "weights", "collectives", "graphs", "smoke"];
// The ladder's steps below the configured mode, as far down as they lie.
const rungs = ["reset", "DFLASH", "NONE", "degraded", "restart", "exit"];

export const isLadder = (e: ServiceEvent) => e.kind === "ladder";

interface Move {
  at: number;
  from: string;
  to: string;
  event: ServiceEvent;
}

function moves(events: ServiceEvent[]): Move[] {
  return events
    .filter(isLadder)
    .map((event) => ({ event, at: event.time, ...(event.detail as { from: string; to: string }) }))
    .filter((m) => typeof m.from === "string" && typeof m.to === "string")
    .sort((a, b) => a.at - b.at || a.event.id - b.event.id);
}

const depth = (step: string, top: string) => (step === top ? 0 : rungs.indexOf(step) + 1);

function ticksOf(from: number, to: number, most: number) {
  const steps = [1e3, 2e3, 5e3, 15e3, 30e3, 60e3, 300e3, 900e3, 3600e3, 3 * 3600e3, 6 * 3600e3, 12 * 3600e3, 86400e3, 2 * 86400e3, 7 * 86400e3, 30 * 86400e3];
  const step = steps.find((s) => (to - from) / s <= most) ?? 90 * 86400e3;
  const ticks: { t: number; text: string }[] = [];
  const zone = new Date(from).getTimezoneOffset() * 60_000;
  for (let t = Math.ceil((from - zone) / step) * step + zone; t < to; t += step) ticks.push({ t, text: step >= 86400e3 ? day(t).slice(5) : step < 60e3 ? clock(t) : clock(t).slice(0, 5) });
  return ticks;
}

function endWords(run: TimelineRun): string {
  if (run.state === "running") return "running now";
  return `${run.end_reason || run.state}${run.exit_code !== null ? ` (exit ${run.exit_code})` : ""}`;
}

// Runs follow each other, so they share one lane; below it the marks of events, and the ladder where any step was taken.
export function Timeline({ runs, now, chosen, label, width = 1200 }: { runs: TimelineRun[]; now: number; chosen?: number; label: string; width?: number }) {
  const left = 76;
  const oldest = [...runs].reverse();
  const from = Math.min(...runs.map((r) => r.started));
  const to = runs.some((r) => r.ended === null) || runs.length > 1 ? now : Math.max(...runs.map((r) => r.ended ?? now));
  const span = Math.max(2_000, to - from);
  const x = (t: number) => left + ((Math.min(to, Math.max(from, t)) - from) / span) * (width - left - 12);
  const marks = runs.flatMap((r) => r.events).filter((e) => !isLadder(e));
  const ladders = oldest.map((run) => ({ run, list: moves(run.events) }));
  const anyMove = ladders.some((l) => l.list.length > 0);
  const used = anyMove ? rungs.filter((r) => ladders.some((l) => l.list.some((m) => m.to === r || m.from === r))) : [];
  const runY = 22;
  const markY = 52;
  const ladderY = 74;
  const rungY = (step: string, top: string) => ladderY + (step === top || depth(step, top) === 0 ? 0 : used.indexOf(step) + 1) * 13;
  const bottom = anyMove ? ladderY + used.length * 13 + 12 : markY + 14;
  const failures = runs.filter((r) => r.state === "crashed" || r.state === "failed").length;
  const summary = `${label}: ${count(runs.length, "start")} since ${moment(from, now)}, ${count(failures, "crash or failure", "crashes or failures")}, ${count(marks.length, "event")}, ${count(
    ladders.reduce((n, l) => n + l.list.length, 0),
    "step of the fault ladder",
    "steps of the fault ladder",
  )}`;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <svg class={width < 1000 ? "timeline narrow" : "timeline"} viewBox={`0 0 ${width} ${bottom + 22}`} role="img" aria-label={summary}>
        {ticksOf(from, to, width / 130).map(({ t, text }) => (
          <g key={t}>
            <line class="tl-tick" x1={x(t)} x2={x(t)} y1={6} y2={bottom} />
            <text class="tl-text" x={x(t)} y={bottom + 16}>
              {text}
            </text>
          </g>
        ))}
        <text class="tl-name" x={left - 10} y={runY + 12}>
          service
        </text>
        <text class="tl-name" x={left - 10} y={markY + 4}>
          events
        </text>
        <rect class="tl-bed" x={left} y={runY} width={width - left - 12} height={16} rx={3} />
        {oldest.map((run) => {
          const end = run.ended ?? now;
          const wide = x(end) - x(run.started);
          return (
            <g key={run.id} class="tl-run">
              <title>{`${moment(run.started, now)}, ${run.version} ${run.mode}, ${duration(end - run.started)}, ${endWords(run)}`}</title>
              {run.phases.map((phase, i) => {
                const until = run.phases[i + 1]?.at ?? end;
                const kind = starting.includes(phase.phase) ? "tl-start" : phase.phase === "ready" ? "tl-up" : phase.phase === "degraded" ? "tl-degraded" : phase.phase === "draining" ? "tl-start" : "";
                return kind && <rect key={i} class={kind} x={x(phase.at)} y={runY} width={Math.max(1, x(until) - x(phase.at))} height={16} />;
              })}
              <line class="tl-begin" x1={x(run.started)} x2={x(run.started)} y1={runY - 3} y2={runY + 19} />
              {wide > 110 && (
                <text class="tl-label" x={x(run.started) + 4} y={runY - 7}>
                  {run.version} {run.mode}
                </text>
              )}
              {run.id === chosen && <rect class="tl-here" x={x(run.started) - 1} y={runY - 3} width={Math.max(4, wide + 2)} height={22} rx={3} />}
            </g>
          );
        })}
        {runs
          .filter((run) => run.state === "crashed" || run.state === "failed")
          .map((run) => (
            <g key={run.id} class="tl-end" transform={`translate(${x(run.ended ?? now)} ${runY + 8})`}>
              <title>{`${moment(run.ended ?? now, now)}: ${endWords(run)}`}</title>
              <circle class="tl-spot" r={8} />
              <path class="tl-crash" d="M-3.5 -3.5l7 7m0 -7l-7 7" />
            </g>
          ))}
        {marks.map((e) => (
          <g key={e.id} class={`tl-mark ${e.severity}`} transform={`translate(${x(e.time)} ${markY})`}>
            <title>{`${moment(e.time, now)} ${e.kind}: ${e.message}`}</title>
            {e.severity === "error" ? <path d="M0 -5L5 0L0 5L-5 0z" /> : e.severity === "warning" ? <rect x={-4} y={-4} width={8} height={8} /> : <circle r={3} />}
          </g>
        ))}
        {anyMove && (
          <>
            <text class="tl-name" x={left - 10} y={ladderY + 4}>
              ladder: top
            </text>
            {used.map((step, i) => (
              <text key={step} class="tl-name" x={left - 10} y={ladderY + (i + 1) * 13 + 4}>
                {step}
              </text>
            ))}
            {ladders.map(({ run, list }) => {
              let at = run.ready ?? run.started;
              const top = run.mode;
              let path = `M${x(at)} ${rungY(top, top)}`;
              for (const m of list) {
                path += `H${x(m.at)}V${rungY(m.to, top)}`;
                at = m.at;
              }
              path += `H${x(run.ended ?? now)}`;
              return (
                <g key={run.id} class="tl-ladder">
                  <path d={path} />
                  {list.map((m) => (
                    <circle key={m.event.id} class={depth(m.to, top) > depth(m.from, top) ? "down" : "up"} cx={x(m.at)} cy={rungY(m.to, top)} r={3.5}>
                      <title>{`${moment(m.at, now)} ${m.from} → ${m.to}: ${m.event.message}`}</title>
                    </circle>
                  ))}
                </g>
              );
            })}
          </>
        )}
      </svg>
    </div>
  );
}

export function TimelineLegend() {
  const box = (name: string, text: string) => (
    <span key={name}>
      <svg width="14" height="8" aria-hidden="true">
        <rect class={name} width="14" height="8" rx="1" />
      </svg>
      {text}
    </span>
  );
  return (
    <span class="legend">
      {box("tl-start", "starting")}
      {box("tl-up", "serving")}
      {box("tl-degraded", "degraded")}
      <span>
        <svg width="14" height="14" aria-hidden="true">
          <path class="tl-crash" d="M3 3l8 8M11 3l-8 8" />
        </svg>
        crashed or failed
      </span>
      <span class="tl-mark error">
        <svg width="12" height="12" aria-hidden="true">
          <path d="M6 1L11 6L6 11L1 6z" />
        </svg>
        error
      </span>
      <span class="tl-mark warning">
        <svg width="10" height="10" aria-hidden="true">
          <rect width="9" height="9" />
        </svg>
        warning
      </span>
    </span>
  );
}
