import { defineConfig } from "vite";

// The page is served by ddtree itself from inside the executable, under a Content-Security-Policy that allows only same-origin files:
// so nothing may be inlined into index.html, and every asset is a file with a hashed name (served as immutable).
export default defineConfig(async ({ mode }) => ({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  // `npm run dev` serves the page over made-up data (web/mock/, never part of a build); `vite --mode live` proxies to a running ddtree.
  plugins: mode === "mock" ? [(await import("./mock/plugin.ts")).mockApi()] : [],
  server: mode === "live" ? { proxy: { "/admin/api": process.env.DDTREE_URL ?? "http://127.0.0.1:30000" } } : {},
  build: {
    target: "es2022",
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 400,
  },
}));
