// Where the nodes of one draft tree go. Pure: rows in, boxes and lines out.
//
// Depth runs to the right. The path that the target took, and then its own choice, lie on the first line, so that what the round wrote
// reads as a line of text. Everything that was drafted and not taken hangs below, likeliest first. Lines never cross: a node with
// children starts below all that was placed before in the columns its own subtree needs.
import type { Round } from "../types.ts";

export type Kind = "root" | "taken" | "missed" | "own";

export interface Node {
  index: number; // row of the round; -1: the target's own choice
  kind: Kind;
  parent: Node | null;
  children: Node[];
  depth: number;
  line: number;
  label: string;
  token: number | null;
  pathLogProb: number | null;
  stepLogProb: number | null;
  rank: number; // among its siblings by the drafter, from 1
  x: number;
  y: number;
  width: number;
}

export interface Layout {
  nodes: Node[]; // every parent before its children
  root: Node;
  end: Node; // last of the taken path (maybe the root), or the target's own choice
  turn: Node; // last accepted row: where the target turned off
  columns: { x: number; width: number }[];
  width: number;
  height: number;
}

export const nodeHeight = 22;
const lineHeight = 29;
const gutter = 26;
const margin = 12;
const top = 26; // depth figures

export function layoutTree(round: Round, label: (token: number | null) => string, textWidth: (text: string) => number): Layout {
  const nodes: Node[] = round.parent.map((parent, index) => ({
    index,
    kind: parent < 0 ? "root" : round.accepted[index] ? "taken" : "missed",
    parent: null,
    children: [],
    depth: 0,
    line: 0,
    label: label(round.token?.[index] ?? null),
    token: round.token?.[index] ?? null,
    pathLogProb: round.log_prob[index] ?? null,
    stepLogProb: null,
    rank: 0,
    x: 0,
    y: 0,
    width: 0,
  }));
  const root = nodes[0]!;
  let turn = root;
  round.parent.forEach((parent, index) => {
    if (parent < 0) return;
    const node = nodes[index]!;
    const above = nodes[parent]!;
    node.parent = above;
    node.depth = above.depth + 1;
    node.stepLogProb = node.pathLogProb !== null && above.pathLogProb !== null ? node.pathLogProb - above.pathLogProb : null;
    above.children.push(node);
    if (node.kind === "taken" && node.depth > turn.depth) turn = node;
  });
  for (const node of nodes) {
    [...node.children].sort(likelier).forEach((child, i) => (child.rank = i + 1));
    node.children.sort((a, b) => (a.kind === "taken" ? -1 : b.kind === "taken" ? 1 : likelier(a, b)));
  }
  let end = turn;
  if (round.next !== -1) {
    end = { ...turn, index: -1, kind: "own", parent: turn, children: [], depth: turn.depth + 1, label: label(round.next), token: round.next, pathLogProb: null, stepLogProb: null, rank: 0 };
    turn.children.unshift(end);
    nodes.push(end);
  }

  // Deepest column that each subtree reaches. Children come after their parents in `nodes` (the own choice last), so backwards works.
  const reach = new Map<Node, number>();
  for (const node of [...nodes].reverse()) reach.set(node, Math.max(node.depth, ...node.children.map((c) => reach.get(c)!)));
  const bottom: number[] = []; // lowest line used so far, by column
  const place = (node: Node, line: number) => {
    node.line = line;
    bottom[node.depth] = line;
    let first = true;
    for (const child of node.children) {
      let at = line;
      if (!first) for (let c = child.depth; c <= reach.get(child)!; ++c) at = Math.max(at, (bottom[c] ?? -1) + 1);
      first = false;
      place(child, at);
    }
  };
  place(root, 0);

  const columns: { x: number; width: number }[] = [];
  for (const node of nodes) {
    node.width = Math.max(20, Math.ceil(textWidth(node.label)) + 14);
    const column = (columns[node.depth] ??= { x: 0, width: 0 });
    column.width = Math.max(column.width, node.width);
  }
  let x = margin;
  for (const column of columns) {
    column.x = x;
    x += column.width + gutter;
  }
  let lines = 0;
  for (const node of nodes) {
    node.x = columns[node.depth]!.x;
    node.y = top + node.line * lineHeight;
    lines = Math.max(lines, node.line);
  }
  return { nodes, root, end, turn, columns, width: x - gutter + margin, height: top + lines * lineHeight + nodeHeight + margin };
}

const likelier = (a: Node, b: Node) => (b.pathLogProb ?? 0) - (a.pathLogProb ?? 0);

// From a node's right side along its line, down in the gutter, to the child's left side.
export function edgePath(child: Node, columns: Layout["columns"]): string {
  const from = child.parent!;
  const x0 = from.x + from.width;
  const y0 = from.y + nodeHeight / 2;
  const x1 = child.x;
  const y1 = child.y + nodeHeight / 2;
  if (y0 === y1) return `M${x0} ${y0}H${x1}`;
  const column = columns[from.depth]!;
  const mid = column.x + column.width + gutter / 2;
  const r = 7;
  return `M${x0} ${y0}H${mid - r}Q${mid} ${y0} ${mid} ${y0 + r}V${y1 - r}Q${mid} ${y1} ${mid + r} ${y1}H${x1}`;
}

// The node that an arrow key leads to: right to the first child, left to the parent, up and down within the column.
export function neighbour(layout: Layout, node: Node, key: string): Node | null {
  switch (key) {
    case "ArrowRight":
      return node.children[0] ?? null;
    case "ArrowLeft":
      return node.parent;
    case "Home":
      return layout.root;
    case "End":
      return layout.end;
    case "ArrowUp":
    case "ArrowDown": {
      const down = key === "ArrowDown";
      const column = layout.nodes.filter((n) => n.depth === node.depth && (down ? n.line > node.line : n.line < node.line));
      column.sort((a, b) => (down ? a.line - b.line : b.line - a.line));
      return column[0] ?? null;
    }
    default:
      return null;
  }
}
