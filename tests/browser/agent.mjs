// Runs a real agent during a test.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { request } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";

const DEADLINE_MS = 60_000;

/** Starts an agent with these settings in its environment. Returns its address and a function that stops it. */
export async function startAgent(binary, settings = {}) {
  const state = mkdtempSync(join(tmpdir(), "gpupool-pages-"));
  const child = spawn(binary, ["serve", "--simulate", "4xH100", "--port", "0", "--state-dir", state], {
    env: { ...process.env, ACCESS_LOG: "false", LOG_LEVEL: "warn", ...settings },
    stdio: ["ignore", "pipe", "inherit"],
  });
  const address = await new Promise((found, failed) => {
    const timer = setTimeout(() => failed(new Error(`no agent after ${DEADLINE_MS / 1000} s`)), DEADLINE_MS);
    let output = "";
    child.stdout.on("data", text => {
      output += text;
      const address = output.match(/listening on (http:\S+)\n/);
      if (address) {
        clearTimeout(timer);
        found(address[1]);
      }
    });
    child.on("exit", code => failed(new Error(`the agent ended with ${code} before it listened`)));
  });
  const stop = async () => {
    const ended = new Promise(done => child.on("exit", done));
    child.kill("SIGTERM");
    await ended;
    rmSync(state, { recursive: true, force: true });
  };
  return { address, stop };
}

/** Requests a lease, or posts to another route. */
export const requestLease = (address, body, route = "/v1/leases") => send("POST", address + route, body);

/** Injects a fault into a device. */
export const injectFault = (address, body) => send("POST", `${address}/v1/simulate/faults`, body);

/** Reads a route. */
export const read = url => send("GET", url);

/** Sends a request as a program. `fetch` of Node.js would not do: it sends `Sec-Fetch-Mode`, as browsers do. */
export async function send(method, url, body) {
  const headers = { "content-type": "application/json", connection: "close" };
  const response = await new Promise((done, failed) =>
    request(url, { method, headers }, done).on("error", failed).end(body && JSON.stringify(body)));
  let text = "";
  for await (const part of response.setEncoding("utf8")) text += part;
  const reply = JSON.parse(text);
  if (response.statusCode >= 300) throw new Error(`${url} was refused: ${text}`);
  return reply;
}
