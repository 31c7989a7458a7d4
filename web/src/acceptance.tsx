// Acceptance as two bar lists: the share of rounds that got past each position, and how many tokens rounds accepted.
import { integer, percent } from "./format.ts";
import { byPosition, histogram } from "./state.ts";
import { Bars } from "./ui.tsx";

export function ByPosition({ acceptedAt, rounds }: { acceptedAt: number[]; rounds: number }) {
  const shares = byPosition(acceptedAt, rounds);
  while (shares.length > 1 && shares[shares.length - 1] === 0) shares.pop();
  return (
    <Bars
      label="Acceptance by position"
      whole={1}
      rows={shares.map((share, i) => ({
        name: `${i + 1}`,
        share,
        value: percent(share),
        title: `${integer(acceptedAt[i]!)} of ${integer(rounds)} rounds accepted at least ${i + 1} drafted`,
      }))}
    />
  );
}

export function Histogram({ acceptedAt, rounds }: { acceptedAt: number[]; rounds: number }) {
  const counts = histogram(acceptedAt, rounds);
  return (
    <Bars
      label="Rounds by accepted tokens"
      rows={counts.map((n, i) => ({ name: `${i}`, share: n, value: integer(n), title: `${integer(n)} rounds accepted exactly ${i} drafted tokens` }))}
    />
  );
}
