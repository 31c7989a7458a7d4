import { useState } from "preact/hooks";
import { ApiError, download, usePolled } from "../api.ts";
import { FilterTools, filterText, filtered } from "../filter.tsx";
import { count, duration, fixed, integer, moment, rate } from "../format.ts";
import { href, route, setQuery } from "../route.ts";
import type { RequestPage as Page, Percentiles, RequestRow, Summary } from "../types.ts";
import { Badge, Empty, LoadError, Pager, Panel, finishTone, useRowKeys } from "../ui.tsx";

const pageSize = 50;
type Order = "newest" | "slowest" | "first_token" | "tokens" | "acceptance" | "speed" | "context";

export function RequestsPage() {
  const query = route.value.query;
  const offset = Number(query.get("offset") ?? 0) || 0;
  const filter = filterText(["sort", "order"]);
  const { data, error } = usePolled<Page>(`requests?limit=${pageSize}&offset=${offset}&${filter}`, 3000);
  const [failed, setFailed] = useState("");
  const keys = useRowKeys();
  const save = async (format: "csv" | "json") => {
    setFailed("");
    try {
      await download(`requests/export?format=${format}&${filter}`, `ddtree-requests.${format}`);
    } catch (problem) {
      setFailed(problem instanceof ApiError ? problem.message : "The server does not answer.");
    }
  };
  if (error && !data) return <LoadError error={error} />;
  return (
    <>
      <div class="head">
        <h1>Requests</h1>
      </div>
      <FilterTools>
        <div class="end">
          <button type="button" onClick={() => void save("csv")} disabled={!data?.total}>
            Export CSV
          </button>
          <button type="button" onClick={() => void save("json")} disabled={!data?.total}>
            Export JSON
          </button>
        </div>
      </FilterTools>
      {failed && (
        <p role="alert">
          <Badge tone="bad">{failed}</Badge>
        </p>
      )}
      <SummaryPanel filter={filterText()} />
      <Panel title="Finished requests" flush aside={data ? `${integer(data.total)} ${filtered() ? "match" : "kept"}` : undefined}>
        {!data ? (
          <Empty title="Reading …" />
        ) : data.total === 0 ? (
          filtered() ? (
            <Empty title="No request matches.">Change the filter, or clear it.</Empty>
          ) : (
            <Empty title="No request has finished yet.">Each one is listed here with its times, tokens and acceptance as soon as it ends.</Empty>
          )
        ) : (
          <>
            <div class="scroll">
              <table>
                <thead>
                  <tr>
                    <Head name="Time" column="newest" />
                    <th scope="col" class="only-wide">
                      Model
                    </th>
                    <th scope="col">Mode</th>
                    <th scope="col" class="num only-wide">
                      Prompt
                    </th>
                    <Head name="Generated" num column="tokens" />
                    <Head name="Context" num wide column="context" />
                    <Head name="TTFT" num column="first_token" />
                    <Head name="Total" num column="slowest" />
                    <Head name="tok/s" num column="speed" />
                    <th scope="col" class="num only-wide">
                      Rounds
                    </th>
                    <Head name="Tokens a round" num column="acceptance" />
                    <th scope="col">Finish</th>
                  </tr>
                </thead>
                <tbody {...keys}>
                  {data.requests.map((r) => (
                    <Row key={r.id} r={r} />
                  ))}
                </tbody>
              </table>
            </div>
            <Pager offset={offset} limit={pageSize} total={data.total} noun="requests" go={(to) => setQuery({ offset: to ? String(to) : "" })}>
              <span class="only-wide small">
                <kbd>↑</kbd> <kbd>↓</kbd> walk, <kbd>Enter</kbd> opens
              </span>
            </Pager>
          </>
        )}
      </Panel>
    </>
  );
}

function Row({ r }: { r: RequestRow }) {
  const link = href(["requests", r.id]);
  return (
    <tr
      class="link"
      onClick={() => {
        location.hash = link;
      }}
    >
      <th scope="row">
        <a class="row-link" data-row href={link} title={r.id}>
          {moment(r.received)}
        </a>
      </th>
      <td class="only-wide" title={r.endpoint}>{r.model}</td>
      <td>{r.mode}</td>
      <td class="num only-wide">{integer(r.prompt_tokens)}</td>
      <td class="num">{integer(r.completion_tokens)}</td>
      <td class="num only-wide">{integer(r.prompt_tokens + r.completion_tokens)}</td>
      <td class="num">{r.completion_tokens ? duration(r.ttft_ms) : "–"}</td>
      <td class="num">{duration(r.total_ms)}</td>
      <td class="num">{r.tokens_per_second ? rate(r.tokens_per_second) : "–"}</td>
      <td class="num only-wide">{integer(r.rounds)}</td>
      <td class="num">{fixed(r.tokens_per_round, 2)}</td>
      <td title={r.error}>
        <Badge tone={finishTone(r.finish)}>{r.finish}</Badge>
        {r.http_status >= 400 && <span class="softer"> {r.http_status}</span>}
      </td>
    </tr>
  );
}

// First click: falling; second: rising; third: newest first again.
function Head(props: { name: string; num?: boolean; wide?: boolean; column: Order }) {
  const query = route.value.query;
  const here = (query.get("sort") ?? "newest") === props.column;
  const rising = query.get("order") === "rising";
  const next = !here ? { sort: props.column, order: "" } : !rising ? { sort: props.column, order: "rising" } : { sort: "", order: "" };
  return (
    <th scope="col" class={`${props.num ? "num" : ""}${props.wide ? " only-wide" : ""}`} aria-sort={here ? (rising ? "ascending" : "descending") : undefined}>
      <button type="button" onClick={() => setQuery({ offset: "", ...next, sort: next.sort === "newest" ? "" : next.sort })}>
        {props.name}
        <span aria-hidden="true">{here ? (rising ? " ↑" : " ↓") : ""}</span>
      </button>
    </th>
  );
}

// What the filter lets through, as percentiles.
function SummaryPanel({ filter }: { filter: string }) {
  const { data } = usePolled<Summary>(`requests/summary?${filter}`, 60_000); // reads every row that matches: not more often than anybody looks
  if (!data || data.totals.requests === 0) return null;
  const rows: [string, Percentiles, (n: number | null) => string, string][] = [
    ["Time to first token", data.ttft_ms, duration, "from arrival, requests that wrote a token"],
    ["Total time", data.total_ms, duration, "from arrival to the last token"],
    ["Decode, tok/s", data.tokens_per_second, rate, "requests of more than one token"],
    ["Tokens a round", data.tokens_per_round, (n) => fixed(n, 2), "speculative requests"],
  ];
  return (
    <Panel title="Percentiles" flush aside={`over ${count(data.totals.requests, "request")}, ${count(data.totals.errors, "error")}`}>
      <div class="scroll" tabIndex={0} role="region" aria-label="Percentiles">
        <table>
          <thead>
            <tr>
              <th scope="col">Figure</th>
              {["p50", "p90", "p95", "p99"].map((p) => (
                <th key={p} scope="col" class="num" title={`The smallest value that ${p.slice(1)} % of the requests do not exceed`}>
                  {p}
                </th>
              ))}
              <th scope="col" class="num">
                Requests
              </th>
            </tr>
          </thead>
          <tbody>
            {rows.map(([name, p, show, what]) => (
              <tr key={name}>
                <th scope="row" title={what}>
                  {name}
                </th>
                {[p.p50, p.p90, p.p95, p.p99].map((v, i) => (
                  <td key={i} class="num">
                    {show(v)}
                  </td>
                ))}
                <td class="num softer">{integer(p.count)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}
