// The filter over requests, in the address: shared by the pages that show them, their acceptance and their export.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { route, setQuery } from "./route.ts";

const names = ["finish", "mode", "error", "thinking", "context", "period", "run", "client"];
const hours: Record<string, number> = { "1h": 1, "24h": 24, "7d": 168, "30d": 720 };
// Prompt and answer together.
const contexts: Record<string, [string, string]> = { "0-1024": ["0", "1024"], "1024-8192": ["1024", "8192"], "8192-32768": ["8192", "32768"], "32768-": ["32768", ""] };

// The API's parameters for what the address says.
export function filterText(extra: string[] = []): string {
  const query = route.value.query;
  const out = new URLSearchParams();
  for (const name of ["finish", "mode", "error", "thinking", "run", "client", ...extra]) {
    const value = query.get(name);
    if (value) out.set(name, value);
  }
  const [low, high] = contexts[query.get("context") ?? ""] ?? ["", ""];
  if (low) out.set("context_from", low);
  if (high) out.set("context_to", high);
  const span = hours[query.get("period") ?? ""];
  // To the minute: the same question is asked again and again, and its answer replaces the one before.
  if (span) out.set("from", String(Math.floor(Date.now() / 60e3) * 60e3 - span * 3600e3));
  return out.toString();
}

export const filtered = () => names.some((n) => route.value.query.get(n));

export function FilterTools({ children, plain = true }: { children?: ComponentChildren; plain?: boolean }) {
  const query = route.value.query;
  const set = (changes: Record<string, string>) => setQuery({ offset: "", ...changes });
  const value = (name: string) => query.get(name) ?? "";
  return (
    <div class="tools" role="search" aria-label="Filter requests">
      <Choice name="Mode" value={value("mode")} choices={[["", "any"], ...(plain ? ["DDTREE", "DFLASH", "NEXTN", "NONE"] : ["DDTREE", "DFLASH", "NEXTN"]).map((m): [string, string] => [m, m])]} set={(mode) => set({ mode })} />
      <Choice name="Thinking" value={value("thinking")} choices={[["", "any"], ["1", "on"], ["0", "off"]]} set={(thinking) => set({ thinking })} />
      <Choice
        name="Context"
        value={value("context")}
        choices={[["", "any"], ["0-1024", "under 1 K"], ["1024-8192", "1 K – 8 K"], ["8192-32768", "8 K – 32 K"], ["32768-", "32 K and more"]]}
        set={(context) => set({ context })}
      />
      <Choice name="Period" value={value("period")} choices={[["", "all kept"], ["1h", "last hour"], ["24h", "last day"], ["7d", "last week"], ["30d", "last 30 days"]]} set={(period) => set({ period })} />
      {plain && (
        <>
          <Choice name="Finish" value={value("finish")} choices={[["", "any"], ...["stop", "length", "tool_calls", "cancelled", "error"].map((f): [string, string] => [f, f])]} set={(finish) => set({ finish })} />
          <Choice name="Error" value={value("error")} choices={[["", "with and without"], ["1", "with an error"], ["0", "without"]]} set={(error) => set({ error })} />
        </>
      )}
      <ClientField value={value("client")} set={(client) => set({ client })} />
      {filtered() && (
        <button type="button" onClick={() => set(Object.fromEntries(names.map((n) => [n, ""])))}>
          Clear{value("run") ? ` (start ${value("run")})` : ""}
        </button>
      )}
      {children}
    </div>
  );
}

function Choice(props: { name: string; value: string; choices: [string, string][]; set: (value: string) => void }) {
  return (
    <label>
      {props.name}
      <select value={props.value} onChange={(event) => props.set(event.currentTarget.value)}>
        {props.choices.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
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
