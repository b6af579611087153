// Runs a real agent during a test.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
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

/** Requests a lease. */
export const requestLease = (address, body) => post(`${address}/v1/leases`, body);

/** Injects a fault into a device. */
export const injectFault = (address, body) => post(`${address}/v1/simulate/faults`, body);

async function post(url, body) {
  const response = await fetch(url, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  const reply = await response.json();
  if (!response.ok) throw new Error(`${url} was refused: ${JSON.stringify(reply)}`);
  return reply;
}
