// A time chart over uPlot. Colours come from the page's custom properties, so that it follows the theme.
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { clock } from "./format.ts";
import { theme } from "./theme.ts";

export interface Line {
  name: string;
  unit: string;
  values: (number | null)[];
  second?: boolean; // the quieter line
  format: (n: number) => string;
}

const colour = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function TimeChart(props: { label: string; time: number[]; lines: Line[]; from: number; to: number; height: number; minTop: number }) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [at, setAt] = useState<number | null>(null);
  const shade = theme.value;
  const names = props.lines.map((l) => l.name).join("|");

  useEffect(() => {
    const host = box.current!;
    const font = `12px ${colour("--sans")}`;
    const axis = { stroke: colour("--ink-3"), font, ticks: { show: false }, grid: { stroke: colour("--line"), width: 1 } };
    const options: uPlot.Options = {
      width: host.clientWidth,
      height: props.height,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      // Minutes and seconds of this browser's zone; x is in seconds.
      scales: { x: { time: true }, y: { range: (_u, _min, max) => [0, Math.max(props.minTop, (max ?? 0) * 1.08)] } },
      axes: [
        { ...axis, grid: { show: false }, space: 64, size: 26, incrs: [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400], values: (_u, splits) => splits.map((s) => clock(s * 1000).slice(0, 5)) },
        { ...axis, size: 46, space: 34 },
      ],
      series: [
        {},
        ...props.lines.map((line) => ({
          label: line.name,
          stroke: colour(line.second ? "--ink-3" : "--accent"),
          width: line.second ? 1 : 1.75,
          dash: line.second ? [4, 3] : undefined,
          fill: line.second ? undefined : colour("--accent-soft"),
          points: { show: false },
        })),
      ],
      hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)] },
    };
    const made = new uPlot(options, [[], ...props.lines.map(() => [])], host);
    plot.current = made;
    const watch = new ResizeObserver(() => {
      if (host.clientWidth !== made.width) made.setSize({ width: host.clientWidth, height: props.height });
    });
    watch.observe(host);
    return () => {
      watch.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shade, names, props.height]);

  useEffect(() => {
    const made = plot.current;
    if (!made) return;
    made.batch(() => {
      made.setData([props.time.map((t) => t / 1000), ...props.lines.map((l) => l.values)], false);
      made.setScale("x", { min: props.from / 1000, max: props.to / 1000 });
    });
  }, [props.time, props.lines, props.from, props.to, shade, names]);

  const last = props.time.length - 1;
  const index = at !== null && at <= last ? at : last;
  const values = props.lines.map((l) => {
    const v = index >= 0 ? l.values[index] : null;
    return v == null ? "–" : l.format(v);
  });
  const summary = index < 0 ? "no data yet" : props.lines.map((l, i) => `${l.name} ${values[i]} ${l.unit}`).join(", ");
  return (
    <figure class="chart" role="img" aria-label={`${props.label}: ${summary}`}>
      <div class="legend">
        {props.lines.map((line, i) => (
          <span key={line.name}>
            <span class={line.second ? "key second" : "key"} />
            {line.name} {values[i]} {line.unit}
          </span>
        ))}
        {index >= 0 && <span class="softer">{at !== null ? `at ${clock(props.time[index]!)}` : "now"}</span>}
      </div>
      <div class="chart-box" ref={box} />
    </figure>
  );
}
