// A start's memory plan: what each kind of allocation takes of the device, and what is left.
import { integer } from "./format.ts";
import type { MemoryPlan } from "./types.ts";
import { Facts } from "./ui.tsx";

export function isMemoryPlan(value: unknown): value is MemoryPlan {
  const plan = value as Partial<MemoryPlan> | null;
  return typeof plan === "object" && plan !== null && Array.isArray(plan.rows) && typeof plan.need_mib === "number" && typeof plan.memory_mib === "number";
}

const mib = (n: number) => n.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export function PlanTable({ plan }: { plan: MemoryPlan }) {
  const share = (n: number) => `${((100 * n) / plan.memory_mib).toFixed(1)} %`;
  return (
    <>
      <Facts
        items={[
          ["device", `${plan.device}, ${integer(plan.memory_mib)} MiB`],
          ["may be used", `${mib(plan.limit_mib)} MiB (--mem-fraction-static ${plan.mem_fraction})`],
          ["sequences", `${plan.max_running} of ${integer(plan.context_length)} tokens`],
          ["KV pages", `${integer(plan.kv_pages)} of ${plan.page_size}: ${integer(plan.kv_tokens)} tokens`],
          ["state slots", integer(plan.state_slots)],
        ]}
      />
      <div class="scroll" tabIndex={0} role="region" aria-label="Memory plan">
        <table>
          <thead>
            <tr>
              <th scope="col">allocation</th>
              <th scope="col" class="num">MiB</th>
              <th scope="col" class="num">share</th>
              <th scope="col">how</th>
            </tr>
          </thead>
          <tbody>
            {plan.rows.map((row) => (
              <tr key={row.name}>
                <td>{row.label}</td>
                <td class="num">{mib(row.mib)}</td>
                <td class="num">{share(row.mib)}</td>
                <td>{row.detail}</td>
              </tr>
            ))}
            <tr>
              <td>sum</td>
              <td class="num">{mib(plan.need_mib)}</td>
              <td class="num">{share(plan.need_mib)}</td>
              <td />
            </tr>
            <tr>
              <td>left</td>
              <td class="num">{mib(plan.left_mib)}</td>
              <td class="num">{share(plan.left_mib)}</td>
              <td>{plan.pinned_host_mib > 0 ? `beside it ${mib(plan.pinned_host_mib)} MiB of pinned host memory` : ""}</td>
            </tr>
          </tbody>
        </table>
      </div>
    </>
  );
}
