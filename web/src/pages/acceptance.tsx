import { ByPosition, Histogram } from "../acceptance.tsx";
import { usePolled } from "../api.ts";
import { FilterTools, filterText, filtered } from "../filter.tsx";
import { count, fixed, integer, percent, rate } from "../format.ts";
import type { Acceptance, AcceptanceGroup } from "../types.ts";
import { Bars, Empty, LoadError, Panel, Stats } from "../ui.tsx";

const shown = [1, 2, 3, 4, 6, 8, 10, 12, 15];

export function AcceptancePage() {
  const { data, error } = usePolled<Acceptance>(`acceptance?${filterText()}`, 60_000); // reads every row that matches: not more often than anybody looks
  if (error && !data) return <LoadError error={error} />;
  const all = data?.speculative;
  return (
    <>
      <div class="head">
        <div>
          <h1>Acceptance</h1>
          <p class="soft">
            How many drafted tokens the target agreed with. Tokens a round = 1 + accepted ÷ rounds; at position i = rounds that accepted at least i drafted tokens ÷ rounds.
          </p>
        </div>
      </div>
      <FilterTools plain={false} />
      {!data || !all ? (
        <Empty title="Reading …" />
      ) : data.by_mode.length === 0 ? (
        <Panel title="Acceptance">
          {filtered() ? (
            <Empty title="No request matches.">Change the filter, or clear it.</Empty>
          ) : (
            <Empty title="No request has made a round yet.">
              Acceptance by position, by mode, with thinking on and off, and by context length appears here with the first finished request.
            </Empty>
          )}
        </Panel>
      ) : (
        <>
          {all.rounds > 0 && (
            <>
              <Stats
                items={[
                  { name: "Tokens a round", value: fixed(all.tokens_per_round, 2), title: "1 + accepted ÷ rounds" },
                  { name: "Decode", value: rate(all.tokens_per_second), unit: "tok/s", title: "Generated tokens after the first ÷ decode time, per request" },
                  { name: "Rounds", value: integer(all.rounds) },
                  { name: "Accepted", value: integer(all.accepted), unit: "tokens" },
                  { name: "Requests", value: integer(all.requests), title: "Speculative ones that made rounds" },
                ]}
              />
              <div class="columns half">
                <Panel title="By position" aside={`of ${count(all.rounds, "round")}`}>
                  {all.accepted > 0 ? <ByPosition acceptedAt={all.accepted_at} rounds={all.rounds} /> : <Empty title="No drafted token was accepted." />}
                </Panel>
                <Panel title="Rounds by accepted tokens">
                  <Histogram acceptedAt={all.accepted_at} rounds={all.rounds} />
                </Panel>
              </div>
            </>
          )}
          <Groups title="By mode" of="Mode" groups={data.by_mode} name={(g) => g.name} />
          <div class="columns half">
            <Groups title="By thinking" of="Thinking" groups={data.by_thinking} name={(g) => g.name} few />
            <Panel title="Tokens a round by context length">
              {data.by_context.length ? (
                <Bars
                  label="Tokens a round by context length"
                  rows={data.by_context.map((g) => ({ name: contextName(g), share: g.tokens_per_round ?? 0, value: fixed(g.tokens_per_round, 2), title: `${count(g.rounds, "round")} of ${count(g.requests, "request")}` }))}
                />
              ) : (
                <Empty title="No speculation in what is shown." />
              )}
            </Panel>
          </div>
          <Groups title="By context length" of="Prompt and answer" groups={data.by_context} name={contextName} />
        </>
      )}
    </>
  );
}

function contextName(g: AcceptanceGroup): string {
  const to = Number(g.name);
  const short = (n: number) => (n >= 1024 ? `${n / 1024} K` : `${n}`);
  return to <= 256 ? "under 256" : `${short(to / 2)} – ${short(to)}`;
}

// Rows of groups, positions in columns; the shade follows the share, the figure says it.
function Groups({ title, of, groups, name, few }: { title: string; of: string; groups: AcceptanceGroup[]; name: (g: AcceptanceGroup) => string; few?: boolean }) {
  const deepest = Math.max(0, ...groups.map((g) => g.accepted_at.reduce((last, n, i) => (n > 0 ? i + 1 : last), 0)));
  const positions = (few ? [1, 2, 4, 8] : shown).filter((p) => p <= Math.max(4, deepest));
  return (
    <Panel title={title} flush>
      {groups.length === 0 ? (
        <Empty title="No speculation in what is shown.">Requests in mode NONE have nothing to accept.</Empty>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label={title}>
          <table class="heat">
            <thead>
              <tr>
                <th scope="col">{of}</th>
                <th scope="col" class="num">
                  Requests
                </th>
                {!few && (
                  <th scope="col" class="num">
                    Rounds
                  </th>
                )}
                <th scope="col" class="num">
                  tok/s
                </th>
                <th scope="col" class="num">
                  Tokens a round
                </th>
                {positions.map((p) => (
                  <th key={p} scope="col" class="num" aria-label={`At position ${p}`}>
                    {p}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {groups.map((g) => (
                <tr key={g.name}>
                  <th scope="row">{name(g)}</th>
                  <td class="num">{integer(g.requests)}</td>
                  {!few && <td class="num">{integer(g.rounds)}</td>}
                  <td class="num">{rate(g.tokens_per_second)}</td>
                  <td class="num">{fixed(g.tokens_per_round, 2)}</td>
                  {positions.map((p) => {
                    const share = g.rounds ? (g.accepted_at[p - 1] ?? 0) / g.rounds : 0;
                    return (
                      <td key={p} class={`num heat${Math.round(share * 10)}`}>
                        {g.name === "NONE" ? "–" : percent(share)}
                      </td>
                    );
                  })}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}
