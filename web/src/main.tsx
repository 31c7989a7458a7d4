import "./style/frame.css";
import "./style/parts.css";
import "./style/charts.css";
import "./style/tree.css";
import "./style/figures.css";
import "./style/last.css";
import { render } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Alerts } from "./alerts.tsx";
import { apiKey, disconnected, giveKey, keyWanted, lastAnswer, usePolled } from "./api.ts";
import { clock } from "./format.ts";
import { AcceptancePage } from "./pages/acceptance.tsx";
import { CompareRunsPage, CompareSmokePage } from "./pages/compare.tsx";
import { HistoryPage } from "./pages/history.tsx";
import { NowPage } from "./pages/now.tsx";
import { RequestPage } from "./pages/request.tsx";
import { RequestsPage } from "./pages/requests.tsx";
import { SmokePage } from "./pages/smoke.tsx";
import { page, route } from "./route.ts";
import { status, statusRefresh } from "./state.ts";
import { theme, toggleTheme } from "./theme.ts";
import type { Status } from "./types.ts";
import { Badge, Empty, phaseTone } from "./ui.tsx";

const tabs = [
  ["now", "Now"],
  ["history", "History"],
  ["requests", "Requests"],
  ["acceptance", "Acceptance"],
  ["smoke", "Smoke tests"],
] as const;

function App() {
  // On the first page the numbers are the point; elsewhere only the phase in the corner is.
  const polled = usePolled<Status>("status", page.value === "now" || page.value === "smoke" ? 1000 : 4000);
  useEffect(() => {
    if (polled.data) status.value = polled.data;
    statusRefresh.value = polled.refresh;
  }, [polled.data]);
  const main = useRef<HTMLElement>(null);
  const where = route.value.parts.join("/");
  const first = useRef(true);
  useEffect(() => {
    const name = tabs.find(([id]) => id === page.value)?.[1] ?? "ddtree";
    const detail = route.value.parts[1];
    document.title = `${detail ? `${detail.slice(0, 20)} · ` : ""}${name} · ddtree`;
    // A new page begins at its top, for the eye and for the keyboard; the first one begins where the browser begins.
    if (!first.current) {
      scrollTo(0, 0);
      main.current?.focus({ preventScroll: true });
    }
    first.current = false;
  }, [where]);
  const locked = keyWanted.value !== "";
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          main.current?.focus();
        }}
      >
        Skip to content
      </a>
      <header class="top">
        <div class="top-in">
          <a class="brand" href="#/now">
            <Mark />
            ddtree
          </a>
          <nav class="tabs" aria-label="Pages">
            {tabs.map(([id, name]) => (
              <a key={id} href={`#/${id}`} aria-current={page.value === id ? "page" : undefined}>
                {name}
              </a>
            ))}
          </nav>
          <div class="top-end">
            <span role="status">
              {disconnected.value ? (
                <Badge tone="bad">disconnected</Badge>
              ) : status.value ? (
                <Badge tone={phaseTone(status.value.phase.word)}>{status.value.phase.word}</Badge>
              ) : (
                <Badge tone="">…</Badge>
              )}
            </span>
            <button type="button" class="icon" onClick={toggleTheme} aria-label={`Switch to ${theme.value === "dark" ? "light" : "dark"} colours`}>
              <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
                <circle cx="8" cy="8" r="6.25" fill="none" stroke="currentColor" stroke-width="1.5" />
                <path d="M8 1.75a6.25 6.25 0 0 1 0 12.5z" fill="currentColor" />
              </svg>
            </button>
          </div>
        </div>
        {disconnected.value && (
          <div class="banner" role="alert">
            {disconnected.value} What you see is from {lastAnswer.value ? clock(lastAnswer.value) : "before"}; this page goes on trying.
          </div>
        )}
        {!disconnected.value && status.value && <Alerts status={status.value} />}
      </header>
      <main id="main" ref={main} tabIndex={-1}>
        {locked ? <KeyForm /> : <CurrentPage />}
      </main>
    </>
  );
}

function CurrentPage() {
  const [name = "now", detail] = route.value.parts;
  switch (name) {
    case "now":
      return <NowPage />;
    case "history":
      return detail === "compare" ? <CompareRunsPage /> : <HistoryPage />;
    case "acceptance":
      return <AcceptancePage />;
    case "requests":
      return detail ? <RequestPage key={detail} id={detail} /> : <RequestsPage />;
    case "smoke":
      return detail === "compare" ? <CompareSmokePage /> : <SmokePage />;
    default:
      return (
        <Empty title="There is no such page.">
          <a href="#/now">Go to the first one.</a>
        </Empty>
      );
  }
}

function KeyForm() {
  const field = useRef<HTMLInputElement>(null);
  return (
    <form
      class="panel key-form"
      onSubmit={(event) => {
        event.preventDefault();
        giveKey(field.current!.value.trim());
      }}
    >
      <h1>This server asks for its key</h1>
      <p class="soft">The one given to it with --api-key. It stays in this tab and is forgotten when the tab is closed.</p>
      <label>
        API key
        <input ref={field} type="password" autocomplete="off" required aria-describedby="key-note" aria-invalid={keyWanted.value === "wrong"} />
      </label>
      <p id="key-note" class="small" role="status">
        {keyWanted.value === "wrong" && apiKey.value ? <Badge tone="bad">The server did not accept that key.</Badge> : ""}
      </p>
      <button type="submit" class="primary">
        Open the dashboard
      </button>
    </form>
  );
}

function Mark() {
  return (
    <svg width="22" height="22" viewBox="0 0 32 32" aria-hidden="true">
      <g fill="none" stroke="var(--accent)" stroke-width="3" stroke-linecap="round" stroke-linejoin="round">
        <path d="M4 9h22" />
        <path d="M9 9v12a4 4 0 0 0 4 4h6" opacity=".55" />
        <path d="M16 9v4a4 4 0 0 0 4 4h5" opacity=".55" />
      </g>
      <circle cx="26" cy="9" r="4" fill="var(--accent)" />
    </svg>
  );
}

render(<App />, document.getElementById("app")!);
