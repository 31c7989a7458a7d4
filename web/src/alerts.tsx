// What is wrong now, in words and since when, over every page: where the eye falls first.
import { duration, moment } from "./format.ts";
import { href } from "./route.ts";
import type { Status } from "./types.ts";

export interface Alert {
  bad: boolean; // answers are in danger; else something is worse than it should be
  text: string;
  since: number | null;
  link?: string;
}

export function alertsOf(s: Status): Alert[] {
  const list: Alert[] = [];
  const { phase, ladder, smoke, store } = s;
  if (phase.word === "failed" || phase.word === "degraded") list.push({ bad: phase.word === "failed", text: phase.sentence, since: phase.since, link: href(["history", s.run_id]) });
  // At the step "degraded" the phase has said it already.
  const told = list.length > 0 && ladder?.reason !== "" && phase.sentence.includes(ladder?.reason);
  if (ladder?.steps.length && ladder.step !== ladder.steps[0] && !told)
    list.push({ bad: ["restart", "exit"].includes(ladder.step), text: `The fault ladder is at “${ladder.step}”, below “${ladder.steps[0]}”${ladder.reason ? `: ${ladder.reason}` : ""}`, since: ladder.since_ms, link: href(["history", s.run_id]) });
  // A failed smoke test is usually why the phase is degraded: once is enough.
  const said = smoke !== null && smoke.message !== "" && phase.sentence.includes(smoke.message);
  if (smoke?.verdict === "fail" && !said) list.push({ bad: true, text: `The last smoke test failed: ${smoke.message}`, since: smoke.finished ?? smoke.started, link: href(["smoke", smoke.id]) });
  if (smoke?.verdict === "pass" && smoke.warning && !phase.sentence.includes(smoke.warning)) list.push({ bad: false, text: `The last smoke test passed with a warning: ${smoke.warning}`, since: smoke.finished ?? smoke.started, link: href(["smoke", smoke.id]) });
  if (store && !store.writable) {
    const lost = store.dropped_rows + store.dropped_trees;
    list.push({ bad: false, text: `The history cannot be written (answers are not affected); ${store.queued_rows} rows wait${lost ? `, ${lost} are lost` : ""}: ${store.message}`, since: store.failing_since });
  }
  if (s.smoke_skipped) list.push({ bad: false, text: "This server runs without its smoke test (--skip-smoke): nothing has shown that its answers make sense", since: s.started });
  return list.sort((a, b) => Number(b.bad) - Number(a.bad));
}

export function Alerts({ status }: { status: Status }) {
  const alerts = alertsOf(status);
  if (alerts.length === 0) return null;
  return (
    <ul class="alerts" aria-label="Alerts">
      {alerts.map((alert) => (
        <li key={alert.text} class={alert.bad ? "banner" : "banner warn"}>
          {alert.text.replace(/\.$/, "")}.{" "}
          {alert.since !== null && (
            <span>
              Since {moment(alert.since, status.now)} ({duration(Math.max(0, status.now - alert.since))}).
            </span>
          )}{" "}
          {alert.link && <a href={alert.link}>Details</a>}
        </li>
      ))}
    </ul>
  );
}
