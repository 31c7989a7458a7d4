import { useEffect, useMemo, useState } from "preact/hooks";
import { ByPosition, Histogram } from "../acceptance.tsx";
import { ApiError, get, usePolled } from "../api.ts";
import { clock, count, day, duration, fixed, integer, rate } from "../format.ts";
import { href, route, setQuery } from "../route.ts";
import { RoundStrip, type Texts, TreeLegend, TreeView, acceptedCount, emittedTokens, tokenLabel } from "../tree/draw.tsx";
import type { RequestDetail, Round, RoundPage } from "../types.ts";
import { Badge, Empty, Facts, Pager, Panel, Stats, finishTone, useRowKeys } from "../ui.tsx";

export function RequestPage({ id }: { id: string }) {
  const { data: r, error } = usePolled<RequestDetail>(`requests/${encodeURIComponent(id)}`, 0);
  const crumb = (
    <p class="crumb">
      <a href="#/requests">Requests</a>
    </p>
  );
  if (error && !r)
    return (
      <>
        {crumb}
        <Panel title={id}>
          <Empty title="This request is not in the history.">{error}</Empty>
        </Panel>
      </>
    );
  if (!r) return <Empty title="Reading …" />;
  return (
    <>
      <div class="head">
        <div>
          {crumb}
          <h1 class="mono">{r.id}</h1>
          <p class="soft">
            <Badge tone={finishTone(r.finish)}>{r.finish}</Badge> {day(r.received)} {clock(r.received)}, {r.endpoint}, {r.stream ? "streamed" : "one reply"}, {r.model}
            {r.thinking === null ? "" : r.thinking ? ", thinking on" : ", thinking off"}
          </p>
          {r.error && <p class="bad-text">{r.error}</p>}
        </div>
      </div>
      <Stats
        items={[
          { name: "Generated", value: integer(r.completion_tokens), unit: "tokens" },
          { name: "Speed", value: r.tokens_per_second ? rate(r.tokens_per_second) : "–", unit: "tok/s" },
          { name: "Tokens a round", value: fixed(r.tokens_per_round, 2), title: "1 + accepted ÷ rounds" },
          { name: "Rounds", value: integer(r.rounds) },
          { name: "First token", value: r.completion_tokens ? duration(r.ttft_ms) : "–" },
          { name: "Total", value: duration(r.total_ms) },
        ]}
      />
      <Trees r={r} />
      {r.trees === 0 && r.rounds > 0 && r.mode !== "NONE" && (
        <div class="columns half">
          <Acceptance r={r} />
        </div>
      )}
      <Panel title="All figures">
        <Facts
          items={[
            ["Mode", r.mode === "DDTREE" ? `DDTREE, budget ${r.budget || "auto"}` : r.mode],
            ["Prompt", count(r.prompt_tokens, "token")],
            ["Of them cached", count(r.cached_tokens, "token")],
            ["Reasoning", count(r.reasoning_tokens, "token")],
            ["Drafted", count(r.drafted, "node")],
            ["Accepted", `${count(r.accepted, "token")}`],
            ["Queue", duration(r.queue_ms)],
            ["Prefill", duration(r.prefill_ms)],
            ["Decode", duration(r.decode_ms)],
            ["Temperature", fixed(r.temperature, 2)],
            ["HTTP status", r.http_status],
            ["Client", r.client || "–"],
            ["Near-ties", `${r.near_ties}${r.smallest_gap !== null ? `, smallest gap ${r.smallest_gap.toPrecision(3)}` : ""}`],
            ...(r.tree_gain || r.shadow_disagreements
              ? ([
                  ["Tree's gain (shadow)", count(r.tree_gain, "token")],
                  ["Disagreements (shadow)", r.shadow_disagreements],
                ] as [string, string | number][])
              : []),
            ["Start", <a href={href(["history", r.run_id])}>number {r.run_id}</a>],
          ]}
        />
      </Panel>
      {r.prompt_text !== null && (
        <Panel title="Prompt">
          <div class="output" tabIndex={0} role="region" aria-label="Prompt text">
            {r.prompt_text}
          </div>
        </Panel>
      )}
      {r.answer_text !== null && (
        <Panel title="Answer">
          <div class="output" tabIndex={0} role="region" aria-label="Answer text">
            {r.answer_text}
          </div>
        </Panel>
      )}
    </>
  );
}

function Acceptance({ r }: { r: RequestDetail }) {
  if (r.mode === "NONE") return null;
  return (
    <>
      <Panel title="Acceptance by position" aside={`of ${count(r.rounds, "round")}`}>
        {r.accepted_at.some((n) => n > 0) ? <ByPosition acceptedAt={r.accepted_at} rounds={r.rounds} /> : <Empty title="No drafted token was accepted." />}
      </Panel>
      <Panel title="Rounds by accepted tokens">
        <Histogram acceptedAt={r.accepted_at} rounds={r.rounds} />
      </Panel>
    </>
  );
}

// All rounds of a request, fetched piece by piece: a long answer has megabytes of trees.
function useRounds(id: string, wanted: number) {
  const [state, setState] = useState<{ rounds: Round[]; texts: Texts; total: number; error: string }>({ rounds: [], texts: {}, total: 0, error: "" });
  useEffect(() => {
    if (wanted === 0) return;
    const abort = new AbortController();
    (async () => {
      const rounds: Round[] = [];
      let texts: Texts = {};
      for (;;) {
        const page = await get<RoundPage>(`requests/${encodeURIComponent(id)}/rounds?offset=${rounds.length}&limit=128`, abort.signal);
        rounds.push(...page.rounds);
        texts = { ...texts, ...page.texts };
        setState({ rounds: [...rounds], texts, total: page.total, error: "" });
        if (page.rounds.length === 0 || rounds.length >= page.total) return;
      }
    })().catch((problem: unknown) => {
      if (!abort.signal.aborted) setState((old) => ({ ...old, error: problem instanceof ApiError ? problem.message : "The server does not answer." }));
    });
    return () => abort.abort();
  }, [id, wanted]);
  return state;
}

function Trees({ r }: { r: RequestDetail }) {
  const { rounds, texts, total, error } = useRounds(r.id, r.trees);
  const [fit, setFit] = useState(false);
  const asked = Number(route.value.query.get("round") ?? 1) || 1;
  const here = Math.max(0, Math.min(rounds.length - 1, asked - 1));
  const go = (index: number) => setQuery({ round: index > 0 ? String(index + 1) : "" });
  if (r.trees === 0 || error)
    return (
      <Panel title="Draft trees">
        <Empty title="No trees of this request are kept.">
          {error ||
            (r.mode === "NONE"
              ? "It was decoded plainly, one token a round."
              : r.rounds === 0
                ? "It ended before its first round."
                : "The newest requests keep theirs; with --store-text they stay with the history.")}
        </Empty>
      </Panel>
    );
  const round = rounds[here];
  if (!round)
    return (
      <Panel title="Draft trees">
        <Empty title="Reading …" />
      </Panel>
    );
  const accepted = acceptedCount(round);
  const nodes = round.parent.length - 1;
  return (
    <>
      <Panel title="Draft trees, round by round" flush aside={total > rounds.length ? `reading ${rounds.length} of ${total}` : `${count(total, "round")}`}>
        <div class="body">
          <RoundStrip rounds={rounds} here={here} go={go} />
        </div>
        <div class="tree-bar">
          <p class="sentence" aria-live="polite">
            <b>Round {here + 1}</b>: {count(nodes, "node")} drafted, the target took <b>{accepted}</b>
            {round.next === -1 ? ", and the answer ended there" : round.next === null ? " and went on by itself" : " and then chose "}
            {round.next !== null && round.next >= 0 && <b class="mono">“{tokenLabel(round.next, texts)}”</b>}.{" "}
            <span class="softer">
              {duration(round.total_ms)}: draft {duration(round.draft_ms)}, verify {duration(round.verify_ms)}
            </span>
          </p>
          <button type="button" disabled={here === 0} onClick={() => go(here - 1)}>
            Previous
          </button>
          <button type="button" disabled={here >= rounds.length - 1} onClick={() => go(here + 1)}>
            Next
          </button>
          <button type="button" aria-pressed={fit} onClick={() => setFit(!fit)}>
            {fit ? "Actual size" : "Fit"}
          </button>
        </div>
        <TreeView round={round} texts={texts} fit={fit} step={(by) => go(Math.max(0, Math.min(rounds.length - 1, here + by)))} toggleFit={() => setFit(!fit)} />
        <div class="body">
          <TreeLegend />
          {round.token === null && <p class="small soft">Token texts are not written to the history without --store-text: the shape and what was accepted stay.</p>}
          <p class="small softer only-wide">
            <kbd>←</kbd> <kbd>→</kbd> <kbd>↑</kbd> <kbd>↓</kbd> walk the tree, <kbd>[</kbd> <kbd>]</kbd> previous and next round, <kbd>f</kbd> fits it to the width
          </p>
        </div>
      </Panel>
      <div class="columns half">
        <div class="stack">
          <Written rounds={rounds} texts={texts} here={here} go={go} />
          <RoundTable rounds={rounds} here={here} go={go} texts={texts} />
        </div>
        <div class="stack">
          <Acceptance r={r} />
        </div>
      </div>
    </>
  );
}

// The answer as the rounds wrote it.
function Written({ rounds, texts, here, go }: { rounds: Round[]; texts: Texts; here: number; go: (index: number) => void }) {
  const first = rounds[0]!;
  return (
    <Panel title="What the rounds wrote" aside="tinted: drafted; underlined: the target's own">
      {first.token === null ? (
        <Empty title="The text was not kept.">It is for the newest requests, and with --store-text for all.</Empty>
      ) : (
        <div class="written" tabIndex={0} role="region" aria-label="The answer by rounds">
          <span class="own">{texts[first.token[0]!] ?? ""}</span>
          {rounds.map((round, i) => {
            const ids = emittedTokens(round);
            const drafted = round.next !== null && round.next >= 0 ? ids.slice(0, -1) : ids;
            return (
              <span key={round.round} class={i === here ? "round here" : "round"} onClick={() => go(i)} title={`Round ${i + 1}`}>
                {drafted.length > 0 && <span class="tok">{drafted.map((id) => texts[id] ?? "").join("")}</span>}
                {round.next !== null && round.next >= 0 && <span class="own">{texts[round.next] ?? ""}</span>}
              </span>
            );
          })}
        </div>
      )}
    </Panel>
  );
}

const tablePage = 25;

function RoundTable({ rounds, here, go, texts }: { rounds: Round[]; here: number; go: (index: number) => void; texts: Texts }) {
  const [offset, setOffset] = useState(0);
  const keys = useRowKeys();
  useEffect(() => setOffset(Math.floor(here / tablePage) * tablePage), [here]);
  const shown = useMemo(() => rounds.slice(offset, offset + tablePage), [rounds, offset]);
  return (
    <Panel title="Rounds" flush>
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th scope="col">Round</th>
              <th scope="col" class="num">
                Position
              </th>
              <th scope="col" class="num">
                Drafted
              </th>
              <th scope="col" class="num">
                Accepted
              </th>
              <th scope="col">Then</th>
              <th scope="col" class="num">
                Draft
              </th>
              <th scope="col" class="num">
                Verify
              </th>
              <th scope="col" class="num">
                Total
              </th>
            </tr>
          </thead>
          <tbody {...keys}>
            {shown.map((round, i) => (
              <tr key={round.round} class={`link${offset + i === here ? " chosen" : ""}`} onClick={() => go(offset + i)}>
                <th scope="row">
                  <button type="button" class="row-link" data-row aria-label={`Show round ${round.round + 1}`} aria-current={offset + i === here ? "true" : undefined}>
                    {round.round + 1}
                  </button>
                </th>
                <td class="num">{integer(round.start)}</td>
                <td class="num">{integer(round.parent.length - 1)}</td>
                <td class="num">{acceptedCount(round)}</td>
                <td class="mono">{round.next === null ? "" : round.next < 0 ? "end" : tokenLabel(round.next, texts)}</td>
                <td class="num">{duration(round.draft_ms)}</td>
                <td class="num">{duration(round.verify_ms)}</td>
                <td class="num">{duration(round.total_ms)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Pager offset={offset} limit={tablePage} total={rounds.length} noun="rounds" go={setOffset} />
    </Panel>
  );
}

