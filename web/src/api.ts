// Every call to the server goes through here: the key, the connection's state, and polling that rests while nobody looks.
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";

const base = new URL("admin/api/", document.baseURI).pathname;
const keyName = "ddtree-api-key";

function storedKey(): string {
  try {
    return sessionStorage.getItem(keyName) ?? "";
  } catch {
    return "";
  }
}

export const apiKey = signal(storedKey());
export const keyWanted = signal<"" | "missing" | "wrong">("");
// When the server last answered anything, and why it does not now.
export const lastAnswer = signal(0);
export const disconnected = signal<string>("");

export function giveKey(key: string) {
  apiKey.value = key;
  try {
    sessionStorage.setItem(keyName, key);
  } catch {
    // Without storage the key lasts as long as the page.
  }
  keyWanted.value = "";
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

async function send(path: string, init: RequestInit = {}): Promise<Response> {
  const headers: Record<string, string> = { Accept: "application/json", ...(init.headers as Record<string, string>) };
  if (apiKey.value) headers.Authorization = `Bearer ${apiKey.value}`;
  let response: Response;
  try {
    response = await fetch(base + path, { ...init, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if ((error as Error).name !== "AbortError") disconnected.value = "The server does not answer.";
    throw error;
  }
  lastAnswer.value = Date.now();
  disconnected.value = "";
  if (response.status === 401) keyWanted.value = apiKey.value ? "wrong" : "missing";
  if (!response.ok) {
    let message = `The server answered ${response.status}.`;
    try {
      message = (await response.json()).error.message ?? message;
    } catch {
      // Not our error shape (a proxy's page, say): the number has to do.
    }
    throw new ApiError(response.status, message);
  }
  return response;
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await send(path, { signal })).json() as Promise<T>;
}

export async function post<T>(path: string, body: unknown = {}): Promise<T> {
  return (await send(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json() as Promise<T>;
}

// Saves a reply as a file. A plain link could not carry the key.
export async function download(path: string, name: string) {
  const url = URL.createObjectURL(await (await send(path)).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export interface Polled<T> {
  data: T | null;
  error: string;
  refresh: () => void;
}

// GETs `path` now and every `every` ms (0: once). Rests while the page is hidden or a key is wanted; slows down while the server is gone.
// A new path keeps the old data until the new one is there, so that tables do not flicker while paging.
export function usePolled<T>(path: string | null, every: number): Polled<T> {
  const [state, setState] = useState<{ data: T | null; error: string }>({ data: null, error: "" });
  const again = useRef<() => void>(() => {});
  const key = apiKey.value;
  const locked = keyWanted.value !== "";
  useEffect(() => {
    if (path === null || locked) return;
    let timer = 0;
    let abort: AbortController | null = null;
    let ended = false;
    const ask = async () => {
      clearTimeout(timer);
      abort?.abort();
      const mine = (abort = new AbortController());
      let wait = every;
      try {
        const data = await get<T>(path, mine.signal);
        if (!ended && abort === mine) setState({ data, error: "" });
      } catch (error) {
        if (ended || abort !== mine) return;
        // A server that is gone is told by the banner over all pages; the last data stays.
        if (error instanceof ApiError) setState((old) => ({ data: error.status === 404 ? null : old.data, error: error.message }));
        if (every === 0 && error instanceof ApiError && error.status !== 503) return;
        wait = Math.max(every, 3000);
      }
      if (!ended && abort === mine && wait > 0 && !document.hidden && keyWanted.value === "") timer = window.setTimeout(ask, wait);
    };
    const wake = () => {
      if (document.hidden) clearTimeout(timer);
      else void ask();
    };
    again.current = () => void ask();
    void ask();
    document.addEventListener("visibilitychange", wake);
    return () => {
      ended = true;
      clearTimeout(timer);
      abort?.abort();
      document.removeEventListener("visibilitychange", wake);
    };
  }, [path, every, key, locked]);
  return { ...state, refresh: () => again.current() };
}
