// One round's draft tree as a drawing that can be walked by keyboard.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { duration, percent, visible } from "../format.ts";
import type { Round } from "../types.ts";
import { type Layout, type Node, edgePath, layoutTree, neighbour, nodeHeight } from "./layout.ts";

const longest = 18;

// How wide a text is in the drawing's font. Fonts differ by system, so it is measured.
const widths = new Map<string, number>();
let canvas: CanvasRenderingContext2D | null = null;
function textWidth(text: string): number {
  let width = widths.get(text);
  if (width === undefined) {
    if (!canvas) {
      canvas = document.createElement("canvas").getContext("2d")!;
      canvas.font = `12px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
    }
    width = canvas.measureText(text).width;
    widths.set(text, width);
  }
  return width;
}

export type Texts = Record<string, string>;

export function tokenLabel(token: number | null, texts: Texts): string {
  if (token === null) return "";
  const text = visible(texts[token] ?? `#${token}`);
  const letters = [...text];
  return letters.length > longest ? `${letters.slice(0, longest - 1).join("")}…` : text;
}

const quoted = (token: number | null, texts: Texts) => (token === null ? "a token" : `“${tokenLabel(token, texts) || "(empty)"}”`);

// Likely nodes are dark, unlikely ones pale. Path probabilities fall by orders of magnitude, hence the root.
const tint = (logProb: number | null) => (logProb === null ? 0 : 0.04 + 0.4 * Math.exp(logProb) ** 0.35);

export function TreeView(props: { round: Round; texts: Texts; fit: boolean; step: (by: number) => void; toggleFit: () => void }) {
  const { round, texts } = props;
  const layout = useMemo(() => layoutTree(round, (token) => tokenLabel(token, texts), textWidth), [round, texts]);
  const [chosen, setChosen] = useState<Node>(layout.end);
  const here = layout.nodes.includes(chosen) ? chosen : layout.end;
  const box = useRef<HTMLDivElement>(null);

  // A new round starts at its beginning; then the chosen node is kept in sight.
  useEffect(() => {
    box.current?.scrollTo(0, 0);
  }, [layout]);
  useEffect(() => {
    const view = box.current;
    if (!view || props.fit || here === layout.end) return;
    const x = here.x - 40;
    const y = here.y - 40;
    if (here.x < view.scrollLeft + 20) view.scrollLeft = x;
    else if (here.x + here.width > view.scrollLeft + view.clientWidth - 20) view.scrollLeft = here.x + here.width - view.clientWidth + 60;
    if (here.y < view.scrollTop + 20) view.scrollTop = y;
    else if (here.y + nodeHeight > view.scrollTop + view.clientHeight - 20) view.scrollTop = here.y - view.clientHeight + 70;
  }, [here, props.fit]);

  const onKeyDown = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "[" || event.key === "PageUp") props.step(-1);
    else if (event.key === "]" || event.key === "PageDown") props.step(1);
    else if (event.key === "f") props.toggleFit();
    else {
      const to = neighbour(layout, here, event.key);
      if (to) setChosen(to);
      else if (!event.key.startsWith("Arrow")) return;
    }
    event.preventDefault();
  };

  const name = (node: Node) => `node-${round.round}-${node.index}`;
  return (
    <>
      <div
        class="tree-view"
        ref={box}
        tabIndex={0}
        role="tree"
        aria-label={`Draft tree of round ${round.round + 1}`}
        aria-activedescendant={name(here)}
        onKeyDown={onKeyDown}
      >
        <svg class={props.fit ? "tree fit" : "tree"} width={layout.width} height={layout.height} viewBox={`0 0 ${layout.width} ${layout.height}`} role="presentation">
          {layout.columns.map((column, depth) => (
            <text key={depth} class="depth-label" x={column.x + column.width / 2} y={16} aria-hidden="true">
              {depth === 0 ? "anchor" : depth}
            </text>
          ))}
          <Edges layout={layout} />
          {layout.nodes.map((node) => (
            <NodeMark key={node.index} id={name(node)} node={node} here={node === here} title={describe(node, layout, round, texts)} choose={() => setChosen(node)} />
          ))}
        </svg>
      </div>
      <NodeFacts node={here} layout={layout} round={round} texts={texts} />
    </>
  );
}

// The lines of the taken path are drawn last, over the others.
function Edges({ layout }: { layout: Layout }) {
  const order = { missed: 0, root: 1, taken: 2, own: 3 };
  const nodes = layout.nodes.filter((n) => n.parent).sort((a, b) => order[a.kind] - order[b.kind]);
  return (
    <g aria-hidden="true">
      {nodes.map((node) => (
        <path key={node.index} class={`edge ${node.kind}`} d={edgePath(node, layout.columns)} />
      ))}
    </g>
  );
}

function NodeMark({ id, node, here, title, choose }: { id: string; node: Node; here: boolean; title: string; choose: () => void }) {
  const step = node.stepLogProb === null ? 0 : Math.exp(node.stepLogProb);
  const inner = node.width - 10;
  return (
    <g id={id} class={`node ${node.kind}${here ? " here" : ""}`} role="treeitem" aria-level={node.depth + 1} aria-selected={here} aria-label={title} transform={`translate(${node.x} ${node.y})`} onClick={choose}>
      <title>{title}</title>
      <rect class="halo" x={-2.5} y={-2.5} width={node.width + 5} height={nodeHeight + 5} rx={7.5} />
      <rect class="pill" width={node.width} height={nodeHeight} rx={5} />
      {node.kind === "missed" && <rect class="tint" width={node.width} height={nodeHeight} rx={5} fill-opacity={tint(node.pathLogProb).toFixed(3)} />}
      {step > 0 && <rect class="bar" x={5} y={nodeHeight - 4} width={Math.max(1, inner * step).toFixed(1)} height={2} rx={1} />}
      <text x={7} y={15}>
        {marks(node.label)}
      </text>
    </g>
  );
}

// Blanks and line ends are drawn fainter than letters.
function marks(label: string) {
  return label.split(/([·↵␍⇥]+)/).map((part, i) => (i % 2 ? <tspan class="mark">{part}</tspan> : part));
}

function describe(node: Node, layout: Layout, round: Round, texts: Texts): string {
  const what = quoted(node.token, texts);
  if (node.kind === "root") return `${what}, the anchor: the last token before this round`;
  if (node.kind === "own") return `${what}, the target's own choice${wasDrafted(layout)}`;
  const likely = `drafted at depth ${node.depth}, path probability ${percent(Math.exp(node.pathLogProb ?? 0))}`;
  if (node.kind === "taken") return `${what}, ${likely}, accepted`;
  const turn = node.parent === layout.turn && round.next !== null && round.next >= 0 ? `, not taken: the target chose ${quoted(round.next, texts)}` : ", not taken";
  return `${what}, ${likely}${turn}`;
}

const wasDrafted = (layout: Layout) => (layout.turn.children.length > 1 ? ", none of those drafted here" : ", nothing was drafted here");

function NodeFacts({ node, layout, round, texts }: { node: Node; layout: Layout; round: Round; texts: Texts }) {
  const text = node.token === null ? null : texts[node.token];
  return (
    <div class="node-facts">
      <span>
        <b class="mono">{node.token === null ? "text not kept" : quoted(node.token, texts)}</b> {node.token !== null && <span class="softer">id {node.token}</span>}
        {text !== undefined && text !== null && [...visible(text)].length > longest && <span class="mono"> {visible(text)}</span>}
      </span>
      <span>
        <span class="softer">position</span> {round.start + node.depth}
      </span>
      <span>
        <span class="softer">depth</span> {node.depth}
      </span>
      {node.stepLogProb !== null && (
        <>
          <span>
            <span class="softer">path</span> {percent(Math.exp(node.pathLogProb!))}
          </span>
          <span>
            <span class="softer">step</span> {percent(Math.exp(node.stepLogProb))}
          </span>
          <span>
            <span class="softer">rank among siblings</span> {node.rank}
          </span>
        </>
      )}
      <span class="soft">{verdict(node, layout, round, texts)}</span>
    </div>
  );
}

function verdict(node: Node, layout: Layout, round: Round, texts: Texts): string {
  switch (node.kind) {
    case "root":
      return "the anchor: chosen before, run through the target in this round";
    case "taken":
      return "drafted, and the target's choice too: accepted";
    case "own":
      return `the target's own choice${wasDrafted(layout)}; the next round's anchor`;
    case "missed":
      if (node.parent === layout.turn) return round.next !== null && round.next >= 0 ? `drafted, but the target chose ${quoted(round.next, texts)} here` : "drafted, not taken";
      if (node.parent!.kind === "missed") return "drafted below a node that was not taken";
      return `drafted, but the target chose ${quoted(node.parent!.children.find((c) => c.kind === "taken")?.token ?? null, texts)} here`;
  }
}

export function TreeLegend() {
  const sample = (kind: Kind, label: string, tinted = 0) => (
    <svg class="tree" width="26" height="16" aria-hidden="true">
      <g class={`node ${kind}`}>
        <rect class="pill" x={0.5} y={0.5} width={25} height={15} rx={4} />
        {tinted > 0 && <rect class="tint" x={0.5} y={0.5} width={25} height={15} rx={4} fill-opacity={tinted} />}
        <text x={9} y={12}>
          {label}
        </text>
      </g>
    </svg>
  );
  return (
    <div class="legend">
      <span>{sample("taken", "a")} drafted and accepted</span>
      <span>{sample("own", "b")} the target's own choice: where it turned off</span>
      <span>
        {sample("missed", "c", 0.44)}
        {sample("missed", "d", 0.1)} drafted, not taken; darker = likelier path
      </span>
      <span>
        <svg width="26" height="6" aria-hidden="true" class="tree">
          <rect class="bar" y={2} width={18} height={2} />
        </svg>
        likelihood of this step alone
      </span>
    </div>
  );
}
type Kind = Node["kind"];

// One bar a round: nodes drafted (pale), accepted (accent), and the target's own token on top. A slider for the keyboard.
export function RoundStrip(props: { rounds: Round[]; here: number; go: (index: number) => void }) {
  const { rounds, here } = props;
  const height = 56;
  const cell = rounds.length > 160 ? 7 : rounds.length > 60 ? 11 : rounds.length > 30 ? 18 : 26;
  const emitted = rounds.map((r) => acceptedCount(r) + (r.next === -1 ? 0 : 1));
  const most = Math.max(2, ...emitted);
  const unit = (height - 4) / most;
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const view = box.current!;
    const x = here * cell;
    if (x < view.scrollLeft) view.scrollLeft = x - cell * 3;
    else if (x + cell > view.scrollLeft + view.clientWidth) view.scrollLeft = x - view.clientWidth + cell * 4;
  }, [here, cell]);
  const onKeyDown = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    props.go(Math.max(0, Math.min(rounds.length - 1, here + by)));
  };
  const round = rounds[here]!;
  return (
    <div
      class="strip"
      ref={box}
      role="slider"
      tabIndex={0}
      aria-label="Round"
      aria-valuemin={1}
      aria-valuemax={rounds.length}
      aria-valuenow={here + 1}
      aria-valuetext={`Round ${here + 1} of ${rounds.length}: ${acceptedCount(round)} of ${round.parent.length - 1} drafted accepted, ${duration(round.total_ms)}`}
      onKeyDown={onKeyDown}
    >
      <svg width={rounds.length * cell} height={height} aria-hidden="true">
        {rounds.map((r, i) => {
          const taken = acceptedCount(r) * unit;
          const own = r.next === -1 ? 0 : unit;
          return (
            <g key={r.round} onClick={() => props.go(i)}>
              <rect class={i === here ? "cell here" : "cell"} x={i * cell} width={cell} height={height} />
              <rect class="taken" x={i * cell + 2} width={cell - 4} y={height - 2 - taken} height={taken} />
              {own > 0 && <rect class="own" x={i * cell + 2} width={cell - 4} y={height - 2 - taken - own + 1} height={Math.max(1.5, own - 1)} />}
              <title>{`Round ${i + 1}: ${acceptedCount(r)} of ${r.parent.length - 1} drafted accepted`}</title>
            </g>
          );
        })}
      </svg>
    </div>
  );
}

// Drafted tokens that the round kept; the root is the round before's.
export function acceptedCount(round: Round): number {
  let n = 0;
  for (let i = 1; i < round.accepted.length; ++i) n += round.accepted[i] ? 1 : 0;
  return n;
}

// Ids that the round added, in order: the accepted path, then the target's own choice.
export function emittedTokens(round: Round): number[] {
  if (!round.token) return [];
  const ids = round.token.filter((_, i) => i > 0 && round.accepted[i]);
  return round.next !== null && round.next >= 0 ? [...ids, round.next] : ids;
}
