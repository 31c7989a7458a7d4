// Two or more starts, and two or more smoke runs, side by side: what differs first.
import { useState } from "preact/hooks";
import { usePolled } from "../api.ts";
import { count, duration, fixed, integer, moment, rate } from "../format.ts";
import { href, route } from "../route.ts";
import type { RunComparison, SmokeCell, SmokeComparison } from "../types.ts";
import { Badge, Empty, LoadError, Panel, verdictTone, verdictWord } from "../ui.tsx";
import { stateTone } from "./history.tsx";

function text(value: unknown, unit: string): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") {
    if (Number.isInteger(value)) return integer(value);
    return unit === "ms" ? value.toFixed(value >= 100 ? 0 : 1) : value.toFixed(value >= 100 ? 0 : 2);
  }
  return typeof value === "object" ? JSON.stringify(value) : String(value) || "(empty)";
}

function change(values: unknown[]): string {
  const [a, b] = values;
  if (values.length !== 2 || typeof a !== "number" || typeof b !== "number" || a === 0) return "";
  const share = b / a - 1;
  return `${share >= 0 ? "+" : "−"}${Math.abs(share * 100).toFixed(Math.abs(share) < 0.1 ? 1 : 0)} %`;
}

export function CompareRunsPage() {
  const ids = route.value.query.get("ids") ?? "";
  const { data, error } = usePolled<RunComparison>(ids ? `runs/compare?ids=${encodeURIComponent(ids)}` : null, 0);
  const crumb = (
    <p class="crumb">
      <a href="#/history">History</a>
    </p>
  );
  if (!ids || (error && !data))
    return (
      <>
        {crumb}
        {ids ? <LoadError error={error} /> : <Empty title="No starts were chosen.">Choose two in the list of starts.</Empty>}
      </>
    );
  if (!data) return <Empty title="Reading …" />;
  const two = data.runs.length === 2;
  const now = Date.now();
  const differing = data.rows.filter((r) => r.differs);
  const alike = data.rows.filter((r) => !r.differs);
  const table = (rows: RunComparison["rows"], label: string) => (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <table class="compare">
        <thead>
          <tr>
            <th scope="col">What</th>
            {data.runs.map((r) => (
              <th key={r.id} scope="col">
                <a href={href(["history", r.id])}>{moment(r.started, now)}</a>
              </th>
            ))}
            {two && (
              <th scope="col" class="num">
                Change
              </th>
            )}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, i) => (
            <tr key={`${row.section} ${row.name}`} class={i > 0 && rows[i - 1]!.section !== row.section ? "next" : ""}>
              <th scope="row">
                <span class="softer">{row.section}</span> {row.name}
              </th>
              {row.values.map((v, k) => (
                <td key={k} class="wrap">
                  {row.name === "verdict" || (row.section === "smoke" && typeof v === "string") ? <Badge tone={verdictTone(String(v))}>{verdictWord(String(v))}</Badge> : row.section === "flags" && v === "" ? "given" : text(v, row.unit)}
                  {row.unit && v !== null && <span class="softer"> {row.unit}</span>}
                </td>
              ))}
              {two && <td class="num">{row.measured ? change(row.values) : ""}</td>}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
  return (
    <>
      <div class="head">
        <div>
          {crumb}
          <h1>{count(data.runs.length, "start")} side by side</h1>
          <p class="soft">
            {data.runs.map((r, i) => (
              <span key={r.id}>
                {i > 0 && " and "}
                {moment(r.started, now)} <Badge tone={stateTone(r.state)}>{r.state}</Badge>
              </span>
            ))}
          </p>
        </div>
        {two && (
          <a class="button" href={href(["history", "compare"], { ids: data.runs.map((r) => r.id).reverse().join(",") })}>
            Swap
          </a>
        )}
      </div>
      <Panel title="What differs" flush aside="figures by more than 5 %">
        {differing.length ? table(differing, "What differs") : <Empty title="Nothing differs.">Flags, plan and smoke test are the same, and the measured figures within 5 %.</Empty>}
      </Panel>
      <Panel title="What is alike" flush aside={count(alike.length, "row")}>
        <details class="fold">
          <summary>Show</summary>
          {table(alike, "What is alike")}
        </details>
      </Panel>
    </>
  );
}

export function CompareSmokePage() {
  const ids = route.value.query.get("ids") ?? "";
  const [onlyDifferent, setOnlyDifferent] = useState(false);
  const { data, error } = usePolled<SmokeComparison>(ids ? `smoke/compare?ids=${encodeURIComponent(ids)}` : null, 0);
  const crumb = (
    <p class="crumb">
      <a href="#/smoke">Smoke tests</a>
    </p>
  );
  if (!ids || (error && !data))
    return (
      <>
        {crumb}
        {ids ? <LoadError error={error} /> : <Empty title="No runs were chosen.">Choose two or more in the list of runs.</Empty>}
      </>
    );
  if (!data) return <Empty title="Reading …" />;
  const now = Date.now();
  const different = data.rows.filter((r) => r.differs).length;
  const rows = onlyDifferent ? data.rows.filter((r) => r.differs) : [...data.rows].sort((a, b) => Number(b.differs) - Number(a.differs));
  const figures: [string, (r: SmokeComparison["runs"][number]) => string][] = [
    ["Version", (r) => r.version],
    ["Trigger", (r) => r.trigger],
    ["tok/s", (r) => rate(r.tokens_per_second)],
    ["Tokens a round", (r) => fixed(r.tokens_per_round, 2)],
    ["Took", (r) => (r.finished ? duration(r.finished - r.started) : "–")],
  ];
  return (
    <>
      <div class="head">
        <div>
          {crumb}
          <h1>{count(data.runs.length, "smoke run")} side by side</h1>
          <p class="soft">{different ? `${count(different, "check")} of ${data.rows.length} differ in verdict or in what the model wrote.` : `All ${data.rows.length} checks gave the same verdicts and the same text.`}</p>
        </div>
        <label class="check-label">
          <input type="checkbox" checked={onlyDifferent} onChange={(e) => setOnlyDifferent(e.currentTarget.checked)} /> Only what differs
        </label>
      </div>
      <Panel title="Checks" flush>
        <div class="scroll" tabIndex={0} role="region" aria-label="Checks side by side">
          <table class="compare">
            <thead>
              <tr>
                <th scope="col">Check</th>
                {data.runs.map((r) => (
                  <th key={r.id} scope="col">
                    <a href={href(["smoke", r.id])}>{moment(r.started, now)}</a> <Badge tone={verdictTone(r.verdict)}>{verdictWord(r.verdict)}</Badge>
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {figures.map(([name, of]) => (
                <tr key={name}>
                  <th scope="row" class="soft">
                    {name}
                  </th>
                  {data.runs.map((r) => (
                    <td key={r.id}>{of(r)}</td>
                  ))}
                </tr>
              ))}
              {rows.map((row, i) => (
                <tr key={i} class={row.differs ? "differs" : ""}>
                  <th scope="row" title={row.what}>
                    {row.name}
                    <br />
                    <span class="softer small">{[row.mode, row.input_id].filter(Boolean).join(" · ")}</span>
                  </th>
                  {row.cells.map((cell, k) => (
                    <td key={k} class="wrap">
                      <Cell cell={cell} same={k > 0 && cell !== null && row.cells[0] != null && cell.output === row.cells[0].output} />
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
          {rows.length === 0 && <Empty title="Nothing differs.">Every check gave the same verdict and the same text in all runs.</Empty>}
        </div>
      </Panel>
    </>
  );
}

function Cell({ cell, same }: { cell: SmokeCell | null; same: boolean }) {
  if (!cell) return <span class="softer">not checked</span>;
  return (
    <>
      <span class="cell-line">
        <Badge tone={verdictTone(cell.verdict)}>{verdictWord(cell.verdict)}</Badge>
        {cell.figure !== null && (
          <span>
            {cell.figure >= 100 ? cell.figure.toFixed(0) : fixed(cell.figure, 2)} <span class="softer">{cell.unit}</span>
          </span>
        )}
        <span class="softer">{duration(cell.ms)}</span>
      </span>
      {cell.message && <p class={cell.verdict === "fail" ? "bad-text small" : "small soft"}>{cell.message}</p>}
      {cell.output && (same ? <p class="small softer">the same text</p> : <div class="output sunk">{cell.output}</div>)}
    </>
  );
}
