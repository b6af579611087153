// Puts an agent with simulated GPUs under load and takes screenshots: `pictures.mjs MODULES BROWSER BINARY ADDRESS FOLDER`, see
// `pictures`.

import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

import { send } from "../tests/browser/agent.mjs";

const [modules, executablePath, binary, address, folder] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "package.json"))("playwright-core");

const THEMES = {
  light: { ground: "#ffffff", bar: "#eceeeb", line: "#d5d9d3", ink: "#1f2421", soft: "#7b847e",
    colours: ["#1f2421", "#b3362b", "#267a5b", "#8a5a00", "#35679a", "#8a4a9e", "#1d7a80", "#5d6761"] },
  dark: { ground: "#131715", bar: "#1f2521", line: "#2e3531", ink: "#e5eae6", soft: "#7d8a82",
    colours: ["#98a39c", "#ef7b6e", "#5cc49a", "#e0a849", "#6ba3dc", "#c792d8", "#5fc3c9", "#e5eae6"] },
};

/** Splits lines with SGR escapes into runs of equal style. */
function styledRuns(text) {
  let style = {};
  return text.trimEnd().split("\n").map(line => {
    const runs = [];
    for (const [, escape, words] of line.trimEnd().matchAll(/\x1b\[([0-9;]*)m|([^\x1b]+)/g)) {
      if (words !== undefined) {
        runs.push({ words, style: { ...style } });
        continue;
      }
      for (const code of (escape || "0").split(";").map(Number)) {
        if (code === 0) style = {};
        else if (code === 1) style.bold = true;
        else if (code === 2) style.faint = true;
        else if (code === 22) style.bold = style.faint = false;
        else if (code >= 30 && code <= 37) style.colour = code - 30;
        else if (code >= 90 && code <= 97) style.colour = code - 90;
        else if (code === 39) delete style.colour;
      }
    }
    return runs;
  });
}

const escaped = words => words.replace(/[&<>]/g, sign => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);

/** A terminal window as SVG. Every piece of text has a fixed position and length, so that columns align in any monospaced font. */
function terminal(lines, theme) {
  const cell = 8.4, leading = 20, margin = 20, head = 34;
  const columns = Math.max(...lines.map(runs => runs.reduce((sum, run) => sum + run.words.length, 0)));
  const width = Math.ceil(columns * cell + 2 * margin), height = lines.length * leading + head + 2 * margin - 6;
  const texts = lines.flatMap((runs, row) => {
    let column = 0;
    return runs.flatMap(({ words, style }) => {
      const start = column;
      column += words.length;
      const fill = style.colour !== undefined ? theme.colours[style.colour] : style.faint ? theme.soft : theme.ink;
      const weight = style.bold ? ` font-weight="700"` : "";
      return [...words.matchAll(/\S+( \S+)*/g)].map(({ 0: shown, index }) =>
        `<text x="${(margin + (start + index) * cell).toFixed(1)}" y="${head + margin + 10 + row * leading}" fill="${fill}"${weight} ` +
        `textLength="${(shown.length * cell).toFixed(1)}">${escaped(shown)}</text>`);
    });
  });
  const dots = [0, 1, 2].map(n => `<circle cx="${margin + n * 18}" cy="${head / 2}" r="5.5" fill="${theme.line}"/>`);
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}">
<rect x=".5" y=".5" width="${width - 1}" height="${height - 1}" rx="9" fill="${theme.ground}" stroke="${theme.line}"/>
<path d="M.5 ${head}V9.5a9 9 0 0 1 9-9h${width - 19}a9 9 0 0 1 9 9V${head}z" fill="${theme.bar}" stroke="${theme.line}"/>
${dots.join("")}
<g font-family="ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="14">
${texts.join("\n")}
</g>
</svg>
`;
}

/** Output of a command in a terminal of 100 columns, with its escapes. */
async function capture(command, heading) {
  const session = `gpupool-pictures-${process.pid}`;
  const tmux = (...words) => execFileSync("tmux", words, { encoding: "utf8" });
  tmux("-f", "/dev/null", "new-session", "-d", "-s", session, "-x", "100", "-y", "40", `${command}; sleep 60`);
  try {
    while (!tmux("capture-pane", "-p", "-t", session).includes(heading)) await sleep(100);
    await sleep(500);
    return tmux("capture-pane", "-e", "-p", "-t", session);
  } finally {
    tmux("kill-session", "-t", session);
  }
}

const post = (route, body) => send("POST", `${address}/v1/${route}`, body);

async function putUnderLoad() {
  const held = (owner, worker_id, request) => post("leases", { owner, worker_id, ttl_secs: 3600, ...request });
  const preview = await held("dave", "preview", { fraction: 0.25, select: { gpu_ids: [4] } });
  await held("alice", "train-llm", { gpus: 2, select: { gpu_ids: [0, 1] } });
  await held("bob", "notebook", { fraction: 0.5, select: { gpu_ids: [2] } });
  await held("carol", "inference", { fraction: 0.3, select: { gpu_ids: [2] } });
  await held("erin", "evaluation", { memory_mib: 24576, select: { gpu_ids: [3] } });
  await held("dave", "render", { fraction: 0.5, select: { gpu_ids: [4] } });
  await post("simulate/faults", { gpu_id: 5, fault: "squatter:4242:30000:90" });
  // A request waits while a call follows it; the calls end with this program.
  const wait = (owner, worker_id, request) => { held(owner, worker_id, { wait_secs: 300, ...request }).catch(() => {}); };
  wait("frank", "finetune", { gpus: 2, select: { model: "H100" } });
  await sleep(1000);
  wait("grace", "sweep-17", { gpus: 4 });
  await send("DELETE", `${address}/v1/leases/${preview.id}`);
}

// Placement needs readings.
await sleep(2000);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
try {
  const pages = [];
  for (const colorScheme of Object.keys(THEMES)) {
    const viewport = { width: 1200, height: 980 };
    const context = await browser.newContext({ viewport, deviceScaleFactor: 1.5, colorScheme, locale: "en-GB" });
    const page = await context.newPage();
    await page.goto(address);
    await page.locator("#gpus .card").nth(5).waitFor();
    pages.push({ page, colorScheme });
  }
  await putUnderLoad();
  // Simulated load grows gradually, like that of a job.
  await sleep(20_000);
  const status = await capture(`'${binary}' status --endpoint '${address}'`, "QUEUE");
  const command = [{ words: "$ ", style: { faint: true } }, { words: "gpupool status", style: { bold: true } }];
  const lines = [command, ...styledRuns(status)];
  for (const [name, theme] of Object.entries(THEMES)) writeFileSync(join(folder, `status-${name}.svg`), terminal(lines, theme));
  for (const { page, colorScheme } of pages) {
    await page.locator("#queue td", { hasText: "grace" }).waitFor();
    await page.locator("#events td", { hasText: "sweep-17" }).first().waitFor();
    const bottom = await page.evaluate(() => document.querySelector("#events tr:nth-child(6)").getBoundingClientRect().bottom);
    await page.setViewportSize({ width: 1200, height: Math.round(bottom) });
    await page.screenshot({ path: join(folder, `page-${colorScheme}.png`) });
  }
} finally {
  await browser.close();
}
process.exit();
