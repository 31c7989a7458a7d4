// Small parts that every page is made of.
import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";
import { moment } from "./format.ts";
import type { ServiceEvent } from "./types.ts";

export function Panel(props: { title: ComponentChildren; aside?: ComponentChildren; flush?: boolean; children: ComponentChildren; id?: string }) {
  return (
    <section class="panel" id={props.id}>
      <header>
        <h2>{props.title}</h2>
        {props.aside != null && <div class="aside">{props.aside}</div>}
      </header>
      <div class={props.flush ? "flush" : "body"}>{props.children}</div>
    </section>
  );
}

export interface StatItem {
  name: string;
  value: ComponentChildren;
  unit?: string;
  // A share to draw under the number.
  meter?: number;
  title?: string;
}

export function Stats({ items, lesser }: { items: StatItem[]; lesser?: boolean }) {
  return (
    <dl class={lesser ? "stats lesser" : "stats"}>
      {items.map((item) => (
        <div key={item.name} title={item.title}>
          <dt>{item.name}</dt>
          <dd>
            {item.value}
            {item.unit && <small>{item.unit}</small>}
            {item.meter !== undefined && <Meter share={item.meter} />}
          </dd>
        </div>
      ))}
    </dl>
  );
}

function Meter({ share }: { share: number }) {
  return (
    <svg class="meter" viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
      <rect class="bed" width="100" height="4" rx="2" />
      <rect class="fill" width={Math.max(0, Math.min(1, share)) * 100} height="4" rx="2" />
    </svg>
  );
}

export function Facts({ items }: { items: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {items.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <strong>{title}</strong>
      {children}
    </div>
  );
}

export type Tone = "good" | "busy" | "warn" | "bad" | "";

export function Badge({ tone, children }: { tone: Tone; children: ComponentChildren }) {
  return <span class={`badge ${tone}`}>{children}</span>;
}

export function finishTone(finish: string): Tone {
  return finish === "error" ? "bad" : finish === "cancelled" ? "warn" : "good";
}

export function verdictTone(verdict: string): Tone {
  return verdict === "pass" ? "good" : verdict === "fail" ? "bad" : verdict === "warn" ? "warn" : "";
}

export const verdictWord = (verdict: string) => ({ pass: "passed", fail: "failed", skip: "skipped", warn: "warning" })[verdict] ?? verdict;

export function phaseTone(word: string): Tone {
  if (word === "ready") return "good";
  if (word === "failed") return "bad";
  if (word === "degraded") return "warn";
  if (word === "stopped") return "";
  return "busy";
}

// Horizontal bars with a name and a figure each: acceptance by position, histograms.
export function Bars(props: { label: string; rows: { name: string; share: number; value: string; title?: string }[]; whole?: number }) {
  const most = props.whole ?? Math.max(1e-9, ...props.rows.map((r) => r.share));
  return (
    <div class="bars" role="list" aria-label={props.label}>
      {props.rows.map((row) => (
        <BarRow key={row.name} {...row} width={row.share / most} />
      ))}
    </div>
  );
}

function BarRow(row: { name: string; share: number; value: string; width: number; title?: string }) {
  return (
    <div role="listitem" title={row.title} class="bar-row">
      <span class="name">{row.name}</span>
      <svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">
        <rect class="bed" width="100" height="12" />
        <rect width={row.width * 100} height="12" />
      </svg>
      <span class="value">{row.value}</span>
    </div>
  );
}

// Rows that are links: up and down walk them, Enter opens (it is a link). Put on <tbody>.
export function useRowKeys() {
  const body = useRef<HTMLTableSectionElement>(null);
  const onKeyDown = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !body.current) return;
    const links = [...body.current.querySelectorAll<HTMLElement>("[data-row]")];
    const here = links.indexOf(document.activeElement as HTMLElement);
    if (here < 0) return;
    event.preventDefault();
    links[Math.max(0, Math.min(links.length - 1, here + step))]?.focus();
  };
  return { ref: body, onKeyDown };
}

export function Pager(props: { offset: number; limit: number; total: number; noun: string; go: (offset: number) => void; children?: ComponentChildren }) {
  const last = Math.min(props.offset + props.limit, props.total);
  return (
    <div class="pager">
      <span class="grow">
        {props.total === 0 ? `No ${props.noun}` : `${props.offset + 1}–${last} of ${props.total} ${props.noun}`}
      </span>
      {props.children}
      {(props.offset > 0 || last < props.total) && (
        <>
          <button type="button" disabled={props.offset === 0} onClick={() => props.go(Math.max(0, props.offset - props.limit))}>
            Previous
          </button>
          <button type="button" disabled={last >= props.total} onClick={() => props.go(props.offset + props.limit)}>
            Next
          </button>
        </>
      )}
    </div>
  );
}

export function EventList({ events, now }: { events: ServiceEvent[]; now: number }) {
  return (
    <ul class="events">
      {events.map((event) => (
        <li key={event.id}>
          <time dateTime={new Date(event.time).toISOString()}>{moment(event.time, now)}</time>
          <span class="text">
            {event.severity !== "info" && <Badge tone={event.severity === "error" ? "bad" : "warn"}>{event.severity}</Badge>} {event.message}{" "}
            <span class="softer mono">{event.kind}</span>
          </span>
        </li>
      ))}
    </ul>
  );
}

export function LoadError({ error }: { error: string }) {
  return (
    <div class="panel">
      <Empty title="This could not be loaded.">{error}</Empty>
    </div>
  );
}
