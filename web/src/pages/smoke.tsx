import { useState } from "preact/hooks";
import { ApiError, post, usePolled } from "../api.ts";
import { ago, clock, day, duration, fixed, moment, rate } from "../format.ts";
import { href, route } from "../route.ts";
import { status, statusRefresh } from "../state.ts";
import type { SmokeCheck, SmokePage as Page, SmokeRun } from "../types.ts";
import { Badge, Empty, Facts, LoadError, Pager, Panel, useRowKeys, verdictTone, verdictWord } from "../ui.tsx";
import { CompareLink } from "./history.tsx";

const pageSize = 20;

export function SmokePage() {
  const [offset, setOffset] = useState(0);
  const [asked, setAsked] = useState(false);
  const [failed, setFailed] = useState("");
  const [picked, setPicked] = useState<number[]>([]);
  const pick = (id: number) => setPicked((old) => (old.includes(id) ? old.filter((p) => p !== id) : [...old, id].slice(-6)));
  const busy = asked || status.value?.smoke_running != null;
  const list = usePolled<Page>(`smoke?limit=${pageSize}&offset=${offset}`, busy ? 700 : 4000);
  const keys = useRowKeys();
  const run = async () => {
    setFailed("");
    setAsked(true);
    try {
      await post("smoke/run");
      statusRefresh.value();
      list.refresh();
      location.hash = href(["smoke"]);
    } catch (problem) {
      setFailed(problem instanceof ApiError ? problem.message : "The server does not answer.");
    } finally {
      setAsked(false);
    }
  };
  if (list.error && !list.data) return <LoadError error={list.error} />;
  const runs = list.data?.runs ?? [];
  const running = list.data?.running ?? status.value?.smoke_running ?? null;
  const wanted = Number(route.value.parts[1] ?? 0);
  const open = runs.find((r) => r.id === wanted) ?? (wanted ? undefined : runs[0]);
  const now = status.value?.now ?? Date.now();
  return (
    <>
      <div class="head">
        <div>
          <h1>Smoke tests</h1>
          <p class="soft">Known questions through the whole engine: are the answers sensible, and is speculation's text the plain one's?</p>
        </div>
        <button type="button" class="primary" onClick={() => void run()} disabled={running !== null || asked || !status.value?.model}>
          {running || asked ? "Running …" : "Run now"}
        </button>
      </div>
      {failed && (
        <p role="alert">
          <Badge tone="bad">{failed}</Badge>
        </p>
      )}
      <div role="status" class="live-region">
        {running && (
          <div class="panel">
            <div class="body">
              <p>A smoke test runs beside the traffic since {clock(running.started)} ({duration(Math.max(0, now - running.started))}).</p>
              <div class="progress" />
            </div>
          </div>
        )}
      </div>
      {list.data && list.data.total === 0 ? (
        <Panel title="Runs">
          <Empty title="No smoke test has run.">
            Each run is kept: at every start, and when asked for here. Its checks, what the model wrote, and its speed are shown then.
          </Empty>
        </Panel>
      ) : (
        <div class="columns half">
          <Panel title="Runs" flush aside={<CompareLink picked={picked} path={["smoke", "compare"]} noun="runs" />}>
            <div class="scroll">
              <table>
                <thead>
                  <tr>
                    <th scope="col">
                      <span class="visually-hidden">Compare</span>
                    </th>
                    <th scope="col">Time</th>
                    <th scope="col">Verdict</th>
                    <th scope="col">Trigger</th>
                    <th scope="col" class="num">
                      Took
                    </th>
                    <th scope="col" class="num">
                      tok/s
                    </th>
                    <th scope="col" class="num">
                      Tokens a round
                    </th>
                  </tr>
                </thead>
                <tbody {...keys}>
                  {runs.map((r) => (
                    <tr
                      key={r.id}
                      class={`link${r.id === open?.id ? " chosen" : ""}`}
                      onClick={() => {
                        location.hash = href(["smoke", r.id]);
                      }}
                    >
                      <td class="pick" onClick={(event) => event.stopPropagation()}>
                        <input type="checkbox" checked={picked.includes(r.id)} onChange={() => pick(r.id)} aria-label={`Compare the run of ${moment(r.started, now)}`} />
                      </td>
                      <th scope="row">
                        <a class="row-link" data-row href={href(["smoke", r.id])} aria-current={r.id === open?.id ? "true" : undefined}>
                          {moment(r.started, now)}
                        </a>
                      </th>
                      <td>
                        <Badge tone={verdictTone(r.verdict)}>{verdictWord(r.verdict)}</Badge>
                      </td>
                      <td>{r.trigger}</td>
                      <td class="num">{r.finished ? duration(r.finished - r.started) : "–"}</td>
                      <td class="num">{rate(r.tokens_per_second)}</td>
                      <td class="num">{fixed(r.tokens_per_round, 2)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
            {list.data && <Pager offset={offset} limit={pageSize} total={list.data.total} noun="runs" go={setOffset} />}
          </Panel>
          {open ? <RunPanel run={open} now={now} /> : wanted && list.data ? <OtherRun id={wanted} now={now} /> : null}
        </div>
      )}
    </>
  );
}

// A run that is not on this page of the list (a link from elsewhere).
function OtherRun({ id, now }: { id: number; now: number }) {
  const { data, error } = usePolled<SmokeRun>(`smoke/${id}`, 0);
  if (error) return <LoadError error={error} />;
  return data ? <RunPanel run={data} now={now} /> : null;
}

function RunPanel({ run, now }: { run: SmokeRun; now: number }) {
  const counts = { pass: 0, fail: 0, skip: 0, warn: 0 };
  for (const check of run.checks) counts[check.verdict]++;
  return (
    <div class="stack">
      <Panel
        title={`${day(run.started)} ${clock(run.started)}`}
        aside={<Badge tone={verdictTone(run.verdict)}>{verdictWord(run.verdict)}</Badge>}
      >
        {run.message && <p class="soft">{run.message}</p>}
        {run.warning && (
          <p>
            <Badge tone="warn">{run.warning}</Badge>
          </p>
        )}
        <Facts
          items={[
            ["Checks", `${counts.pass} passed, ${counts.fail} failed, ${counts.skip} skipped${counts.warn ? `, ${counts.warn} with a warning` : ""}`],
            ["When", ago(run.started, now)],
            ["Trigger", run.previous_version ? `${run.trigger} from ${run.previous_version}` : run.trigger],
            ["Version", run.version],
            ["Model", run.model],
            ["Asked", run.subject || "its own engine"],
            [
              "Before",
              run.before
                ? `${rate(run.before.tokens_per_second)} tok/s, ${fixed(run.before.tokens_per_round, 2)} tokens a round (median of ${run.before.runs})`
                : "no earlier run to compare with",
            ],
            ["Start", run.run_id ? <a href={href(["history", run.run_id])}>number {run.run_id}</a> : "by hand"],
          ]}
        />
      </Panel>
      <Panel title="Checks" flush>
        {run.checks.length === 0 ? (
          <Empty title="No check ran.">{run.message}</Empty>
        ) : (
          <div class="checks">
            {groups(run.checks).map((group) => (
              <CheckGroup key={group[0]!.name} checks={group} />
            ))}
          </div>
        )}
      </Panel>
    </div>
  );
}

// Checks of one name in a row: one heading for them all.
function groups(checks: SmokeCheck[]): SmokeCheck[][] {
  const list: SmokeCheck[][] = [];
  for (const check of checks) {
    const last = list[list.length - 1];
    if (last && last[0]!.name === check.name) last.push(check);
    else list.push([check]);
  }
  return list;
}

function CheckGroup({ checks }: { checks: SmokeCheck[] }) {
  const first = checks[0]!;
  const some = (verdict: string) => checks.some((c) => c.verdict === verdict);
  const verdict = some("fail") ? "fail" : some("warn") ? "warn" : checks.every((c) => c.verdict === "skip") ? "skip" : "pass";
  return (
    <section class="check-group">
      <h3>
        <Badge tone={verdictTone(verdict)}>{first.name}</Badge>
        <span class="softer small">{verdictWord(verdict)}</span>
      </h3>
      {first.what && <p class="small soft">{first.what}</p>}
      {checks.map((check, i) => (
        <Check key={i} check={check} />
      ))}
    </section>
  );
}

function Check({ check }: { check: SmokeCheck }) {
  const line = (
    <>
      <Badge tone={verdictTone(check.verdict)}>{[check.mode, check.input_id].filter(Boolean).join(" · ") || "result"}</Badge>
      <span class="visually-hidden">{verdictWord(check.verdict)}</span>
      <span class="grow" />
      {check.figure !== null && (
        <span>
          {Number.isInteger(check.figure) ? check.figure : check.figure >= 100 ? check.figure.toFixed(0) : fixed(check.figure, 2)} <span class="softer">{check.unit}</span>
        </span>
      )}
      <span class="softer took">{duration(check.ms)}</span>
    </>
  );
  return (
    <div class="check" data-verdict={check.verdict}>
      {check.output ? (
        // Plain answers are the ones to read; other modes wrote the same, or failed.
        <details open={check.verdict === "fail" || (check.name === "coherent" && check.verdict === "pass")}>
          <summary>{line}</summary>
          <div class="output" tabIndex={0} role="region" aria-label={`What the model wrote: ${check.name} ${check.mode} ${check.input_id}`}>
            {check.output}
          </div>
        </details>
      ) : (
        <div class="line">{line}</div>
      )}
      {check.message && <p class={check.verdict === "fail" ? "bad-text small" : "small soft"}>{check.message}</p>}
    </div>
  );
}
