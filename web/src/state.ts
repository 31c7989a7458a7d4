// What every page needs to know: the status, asked for once and shared.
import { signal } from "@preact/signals";
import type { EngineNow, Status } from "./types.ts";

export const status = signal<Status | null>(null);
// The status as last asked again by hand (after "Run now", say).
export const statusRefresh = signal<() => void>(() => {});

export function modeText(engine: Pick<EngineNow, "mode" | "budget" | "shadow_linear" | "nextn_steps">): string {
  if (engine.mode === "DDTREE") {
    const budget = engine.budget ? `budget ${engine.budget}` : "budget auto";
    return `DDTREE, ${budget}${engine.shadow_linear ? ", shadow linear" : ""}`;
  }
  if (engine.mode === "NEXTN") return `NEXTN, ${engine.nextn_steps} steps`;
  if (engine.mode === "NONE") return "plain decoding";
  return engine.mode;
}

// Depth by depth: accepted_at[i] rounds of `rounds` accepted at least i + 1 drafted tokens.
export function byPosition(acceptedAt: number[], rounds: number) {
  return acceptedAt.map((n) => (rounds ? n / rounds : 0));
}

// Rounds by how many drafted tokens they accepted: 0, 1, 2, …
export function histogram(acceptedAt: number[], rounds: number): number[] {
  if (!rounds) return [];
  const atLeast = [rounds, ...acceptedAt, 0];
  const result = atLeast.slice(0, -1).map((n, i) => n - atLeast[i + 1]!);
  while (result.length > 1 && result[result.length - 1] === 0) result.pop();
  return result;
}
