import { useEffect, useState } from "preact/hooks";
import { ApiError, download, usePolled } from "../api.ts";
import { duration, fixed, integer, moment, rate } from "../format.ts";
import { href, route, setQuery } from "../route.ts";
import type { RequestPage as Page, RequestRow } from "../types.ts";
import { Badge, Empty, LoadError, Pager, Panel, finishTone, useRowKeys } from "../ui.tsx";

const pageSize = 50;
// Column -> the orders of the store that it can show (first click, second click).
type Order = "newest" | "oldest" | "slowest" | "first_token" | "tokens" | "acceptance" | "speed";

function queryText(): string {
  const query = route.value.query;
  const out = new URLSearchParams();
  for (const name of ["finish", "mode", "error", "run", "client", "sort"]) {
    const value = query.get(name);
    if (value) out.set(name, value);
  }
  return out.toString();
}

export function RequestsPage() {
  const query = route.value.query;
  const offset = Number(query.get("offset") ?? 0) || 0;
  const filter = queryText();
  const { data, error } = usePolled<Page>(`requests?limit=${pageSize}&offset=${offset}&${filter}`, 3000);
  const [failed, setFailed] = useState("");
  const keys = useRowKeys();
  const sort = (query.get("sort") ?? "newest") as Order;
  const set = (changes: Record<string, string>) => setQuery({ offset: "", ...changes });
  const filtered = ["finish", "mode", "error", "run", "client"].some((n) => query.get(n));
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
      <div class="tools" role="search" aria-label="Filter requests">
        <Choice name="Finish" value={query.get("finish") ?? ""} choices={["stop", "length", "tool_calls", "cancelled", "error"]} set={(finish) => set({ finish })} />
        <Choice name="Mode" value={query.get("mode") ?? ""} choices={["DDTREE", "DFLASH", "NEXTN", "NONE"]} set={(mode) => set({ mode })} />
        <label>
          Error
          <select value={query.get("error") ?? ""} onChange={(event) => set({ error: event.currentTarget.value })}>
            <option value="">with and without</option>
            <option value="1">with an error</option>
            <option value="0">without</option>
          </select>
        </label>
        <ClientField value={query.get("client") ?? ""} set={(client) => set({ client })} />
        {filtered && (
          <button type="button" onClick={() => set({ finish: "", mode: "", error: "", run: "", client: "" })}>
            Clear{query.get("run") ? ` (start ${query.get("run")})` : ""}
          </button>
        )}
        <div class="end">
          <button type="button" onClick={() => void save("csv")} disabled={!data?.total}>
            Export CSV
          </button>
          <button type="button" onClick={() => void save("json")} disabled={!data?.total}>
            Export JSON
          </button>
        </div>
      </div>
      {failed && (
        <p role="alert">
          <Badge tone="bad">{failed}</Badge>
        </p>
      )}
      <Panel title="Finished requests" flush aside={data ? `${integer(data.total)} ${filtered ? "match" : "kept"}` : undefined}>
        {!data ? (
          <Empty title="Reading …" />
        ) : data.total === 0 ? (
          filtered ? (
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
                    <Head name="Time" sort={sort} first="newest" second="oldest" set={set} />
                    <th scope="col" class="only-wide">
                      Model
                    </th>
                    <th scope="col">Mode</th>
                    <th scope="col" class="num only-wide">
                      Prompt
                    </th>
                    <Head name="Generated" num sort={sort} first="tokens" set={set} />
                    <Head name="TTFT" num sort={sort} first="first_token" set={set} />
                    <Head name="Total" num sort={sort} first="slowest" set={set} />
                    <Head name="tok/s" num sort={sort} first="speed" set={set} />
                    <th scope="col" class="num only-wide">
                      Rounds
                    </th>
                    <Head name="Tokens a round" num sort={sort} first="acceptance" set={set} />
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

function Head(props: { name: string; num?: boolean; sort: Order; first: Order; second?: Order; set: (q: Record<string, string>) => void }) {
  const first = props.sort === props.first;
  const second = props.second !== undefined && props.sort === props.second;
  const next = first ? (props.second ?? "newest") : props.first;
  return (
    <th scope="col" class={props.num ? "num" : ""} aria-sort={first ? "descending" : second ? "ascending" : undefined}>
      <button type="button" onClick={() => props.set({ sort: next === "newest" ? "" : next })}>
        {props.name}
        <span aria-hidden="true">{first ? " ↓" : second ? " ↑" : ""}</span>
      </button>
    </th>
  );
}

function Choice(props: { name: string; value: string; choices: string[]; set: (value: string) => void }) {
  return (
    <label>
      {props.name}
      <select value={props.value} onChange={(event) => props.set(event.currentTarget.value)}>
        <option value="">any</option>
        {props.choices.map((c) => (
          <option key={c} value={c}>
            {c}
          </option>
        ))}
      </select>
    </label>
  );
}

// Asks only once typing has paused.
function ClientField({ value, set }: { value: string; set: (value: string) => void }) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  useEffect(() => {
    if (text === value) return;
    const timer = setTimeout(() => set(text.trim()), 350);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <label>
      Client
      <input type="search" value={text} placeholder="part of its name" onInput={(event) => setText(event.currentTarget.value)} />
    </label>
  );
}
