import { ByPosition, Histogram } from "../acceptance.tsx";
import { usePolled } from "../api.ts";
import { TimeChart } from "../chart.tsx";
import { ago, count, duration, fixed, integer, moment, rate } from "../format.ts";
import { href } from "../route.ts";
import { modeText, status } from "../state.ts";
import type { EventPage, LiveRequest, Series, Status } from "../types.ts";
import { Badge, Empty, EventList, Panel, Stats, phaseTone, verdictTone, verdictWord } from "../ui.tsx";

export function NowPage() {
  const now = status.value;
  const series = usePolled<Series>("series?minutes=60", 5000).data;
  const events = usePolled<EventPage>("events?limit=12", 4000).data;
  if (!now) return <Empty title="Asking the server …" />;
  // Right after a start an hour would be an empty chart with a line at its edge.
  const from = series ? Math.max(series.from, Math.min(series.time[0] ?? series.from, series.to - 300_000)) : 0;
  const e = now.engine;
  return (
    <>
      <Headline now={now} />
      <Stats
        items={[
          { name: "Decode", value: rate(e.decode_tps_1m), unit: "tok/s", title: "Generated tokens a second over the last minute; 0 when idle" },
          { name: "Prefill", value: rate(e.prefill_tps_1m), unit: "tok/s", title: "Prompt tokens a second over the last minute" },
          { name: "Tokens a round", value: fixed(e.tokens_per_round_1m || (e.rounds ? 1 + e.accepted / e.rounds : null), 2), title: "Mean acceptance length: 1 + accepted ÷ rounds; last minute, or since the server was ready when idle" },
          { name: "Running", value: integer(e.running), unit: `of ${e.max_running}`, meter: e.max_running ? e.running / e.max_running : 0 },
          { name: "Waiting", value: integer(e.waiting), unit: `of ${e.max_queue}`, meter: e.max_queue ? e.waiting / e.max_queue : 0 },
          { name: "Pages", value: integer(e.pages_used), unit: `of ${integer(e.pages_total)}`, meter: e.pages_total ? e.pages_used / e.pages_total : 0, title: "KV pages in use" },
          { name: "Slots", value: integer(e.slots_used), unit: `of ${e.slots_total}`, meter: e.slots_total ? e.slots_used / e.slots_total : 0, title: "Recurrent-state slots in use" },
          { name: "Finished", value: integer(e.finished), unit: e.failed ? `${e.failed} failed` : e.cancelled ? `${e.cancelled} cancelled` : "", title: "Requests since the server was ready" },
        ]}
      />
      <div class="columns two-one">
        <div class="stack">
          <Panel title="Tokens a second, last hour">
            {series && series.time.length > 1 ? (
              <TimeChart
                label="Tokens a second over the last hour"
                time={series.time}
                from={from}
                to={series.to}
                height={210}
                minTop={10}
                lines={[
                  { name: "decode", unit: "tok/s", values: series.decode_tps, format: rate },
                  { name: "prefill", unit: "tok/s", values: series.prefill_tps, format: rate, second: true },
                ]}
              />
            ) : (
              <Empty title="Nothing measured yet.">The last hour's decode and prefill speed appears here within seconds of the start.</Empty>
            )}
          </Panel>
          <Panel title="Running and waiting" flush aside={now.live.length ? count(now.live.length, "request") : undefined}>
            <LiveTable live={now.live} now={now.now} />
          </Panel>
          <Panel title="Recent events" flush>
            {events?.events.length ? (
              <EventList events={events.events} now={now.now} />
            ) : (
              <Empty title="No events.">Fallbacks to plain decoding, suspicious streams, failed checks and restarts are told here.</Empty>
            )}
          </Panel>
        </div>
        <div class="stack">
          {now.ladder?.steps.length > 0 && <LadderPanel now={now} />}
          <Panel title="Tokens a round, last hour">
            {series && series.tokens_per_round.some((n) => n !== null) ? (
              <TimeChart
                label="Mean tokens a round over the last hour"
                time={series.time}
                from={from}
                to={series.to}
                height={120}
                minTop={2}
                lines={[{ name: "mean", unit: "a round", values: series.tokens_per_round, format: (n) => n.toFixed(2) }]}
              />
            ) : (
              <Empty title="No rounds in the last hour.">What each verify pass committed appears here.</Empty>
            )}
          </Panel>
          <Panel title="Acceptance by position" aside={e.rounds ? `${count(e.rounds, "round")} since it was ready` : undefined}>
            {e.rounds && e.accepted_at.some((n) => n > 0) ? (
              <ByPosition acceptedAt={e.accepted_at} rounds={e.rounds} />
            ) : (
              <Empty title="No speculation yet.">The share of rounds in which the target agreed with the first, second, third … drafted token.</Empty>
            )}
          </Panel>
          {e.rounds > 0 && e.accepted_at.some((n) => n > 0) && (
            <Panel title="Rounds by accepted tokens">
              <Histogram acceptedAt={e.accepted_at} rounds={e.rounds} />
            </Panel>
          )}
        </div>
      </div>
    </>
  );
}

function Headline({ now }: { now: Status }) {
  const smoke = now.smoke;
  return (
    <div class="head">
      <div>
        <h1>
          <Badge tone={phaseTone(now.phase.word)}>
            <span class="visually-hidden">Phase: </span>
          </Badge>
          {now.phase.sentence}
        </h1>
        <p class="soft">
          {now.model && (
            <>
              <b>{now.model.name}</b> on {now.model.backend} with {modeText(now.engine)}
              {". "}
            </>
          )}
          {now.ready_since ? `Ready since ${moment(now.ready_since, now.now)} (${duration(now.now - now.ready_since)}). ` : `Started ${ago(now.started, now.now)}. `}
          {now.smoke_skipped ? (
            <Badge tone="warn">smoke test skipped (--skip-smoke)</Badge>
          ) : smoke ? (
            <a href={href(["smoke", smoke.id])}>
              <Badge tone={verdictTone(smoke.verdict)}>
                Smoke test {verdictWord(smoke.verdict)} {ago(smoke.finished ?? smoke.started, now.now)}
                {smoke.tokens_per_second ? `, ${rate(smoke.tokens_per_second)} tok/s` : ""}
              </Badge>
            </a>
          ) : (
            "No smoke test yet."
          )}
        </p>
      </div>
    </div>
  );
}

// The steps that faults lead down and proof leads up, with the one the service stands on.
function LadderPanel({ now }: { now: Status }) {
  const { steps, step, reason, since_ms } = now.ladder;
  const at = steps.indexOf(step);
  return (
    <Panel title="Fault ladder" aside={since_ms ? `since ${moment(since_ms, now.now)}` : undefined}>
      <ol class="rungs">
        {steps.map((name, i) => (
          <li key={name} aria-current={name === step ? "step" : undefined} class={name === step ? (i === 0 ? "here" : "here low") : ""}>
            {name}
          </li>
        ))}
      </ol>
      <p class="small soft">{at <= 0 && !reason ? "At the top: no fault has led down a step." : `${at <= 0 ? "Back at the top" : "Last step"}: ${reason}`}</p>
    </Panel>
  );
}

function LiveTable({ live, now }: { live: LiveRequest[]; now: number }) {
  if (live.length === 0) return <Empty title="Idle.">Requests show here from their arrival to their last token.</Empty>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Running and waiting requests">
      <table>
        <thead>
          <tr>
            <th scope="col">Request</th>
            <th scope="col">State</th>
            <th scope="col">Mode</th>
            <th scope="col" class="num">
              Prompt
            </th>
            <th scope="col" class="num">
              Generated
            </th>
            <th scope="col" class="num">
              Limit
            </th>
            <th scope="col" class="num">
              Age
            </th>
            <th scope="col">Client</th>
          </tr>
        </thead>
        <tbody>
          {live.map((r) => (
            <tr key={r.id}>
              <th scope="row" class="mono">
                {r.id.slice(0, 18)}
              </th>
              <td>{r.completion_tokens > 0 ? <Badge tone="good">generating</Badge> : <Badge tone="busy">waiting or prefill</Badge>}</td>
              <td>{r.mode}</td>
              <td class="num">{integer(r.prompt_tokens)}</td>
              <td class="num">{integer(r.completion_tokens)}</td>
              <td class="num">{integer(r.max_tokens)}</td>
              <td class="num">{duration(Math.max(0, now - r.started))}</td>
              <td class="softer">{r.client}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
