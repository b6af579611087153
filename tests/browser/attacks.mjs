// What pages of other sites can do to an agent on this machine: `attacks.mjs HOME BROWSER BINARY`, see `run`.

import assert from "node:assert/strict";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { join } from "node:path";

import { requestLease, read, startAgent } from "./agent.mjs";

const [home, browserPath, binary] = process.argv.slice(2);
const { chromium } = createRequire(join(home, "package.json"))("playwright-core");
const FOREIGN_SITE = "evil.test";
const GUARDED = ["/v1/leases", "/v1/pool", "/v1/devices", "/v1/history", "/v1/usage", "/v1/tokens", "/metrics", "/config"];

/** Serves an empty page on a free port. */
async function startSite() {
  const server = createServer((_, response) => response.setHeader("content-type", "text/html").end("<title>evil</title><body>"));
  await new Promise(done => server.listen(0, "127.0.0.1", done));
  return { port: server.address().port, stop: () => new Promise(done => server.close(done)) };
}

/** Attacks an agent from the page that runs it, and says what succeeded. Runs in the browser. */
async function attack({ agent, id, token, guarded }) {
  const succeeded = [];
  const pause = ms => new Promise(done => setTimeout(done, ms));
  const changes = [
    ["GET", `/v1/leases/${id}/hold?token=${token}`],
    ["POST", `/v1/leases/${id}/hold`, { token }],
    ["POST", `/v1/leases/${id}/renew`, { token }],
    ["POST", `/v1/leases/${id}/revoke`, { grace_secs: 0 }],
    ["DELETE", `/v1/leases/${id}`],
    ["POST", "/v1/leases", { fraction: 0.1 }],
    ["POST", "/v1/leases/follow", { leases: [id] }],
    ["POST", "/v1/devices/0/cordon", {}],
    ["POST", "/v1/tokens", { owner: "evil", admin: true }],
    ["POST", "/v1/simulate/faults", { gpu_id: 0, fault: "lost" }],
  ];
  const open = [];
  for (const [method, path, body] of changes) {
    if (method === "GET") {
      await new Promise(done => Object.assign(new Image(), { onload: done, onerror: done, src: agent + path }));
    } else if (method === "POST") {
      // A form sends any text: a name, an equals sign and a value.
      const name = JSON.stringify({ ...body, _: "" }).slice(0, -2), value = `"}`;
      const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { name: `frame${path}` }));
      const form = document.createElement("form");
      Object.assign(form, { method: "post", action: agent + path, enctype: "text/plain", target: frame.name });
      form.append(Object.assign(document.createElement("input"), { name, value }));
      document.body.append(form);
      form.submit();
      navigator.sendBeacon(agent + path, JSON.stringify(body));
    }
    for (const mode of ["no-cors", "cors"]) {
      for (const type of ["text/plain", "application/json"]) {
        const abort = new AbortController();
        open.push(abort);
        const headers = { "content-type": type };
        const sent = fetch(agent + path, { method, mode, headers, signal: abort.signal, body: body && JSON.stringify(body) });
        const readable = sent.then(answer => answer.type !== "opaque", () => false);
        if (await Promise.race([readable, pause(2000).then(() => false)])) succeeded.push(`fetch ${mode} ${method} ${path}`);
      }
    }
  }
  for (const path of guarded) {
    const readable = await fetch(agent + path).then(() => true, () => false);
    if (readable) succeeded.push(`read ${path}`);
    for (const tag of ["script", "link"]) {
      const loads = await new Promise(done => {
        const node = Object.assign(document.createElement(tag), { onload: () => done(true), onerror: () => done(false) });
        Object.assign(node, tag === "link" ? { rel: "stylesheet", href: agent + path } : { src: agent + path });
        document.head.append(node);
      });
      if (loads) succeeded.push(`${tag} ${path}`);
    }
  }
  const stream = await new Promise(done => {
    const events = new EventSource(`${agent}/v1/events`);
    Object.assign(events, { onopen: () => done(true), onerror: () => done(false) });
  });
  if (stream) succeeded.push("EventSource");
  for (const path of ["/v1/events", `/v1/leases/${id}/hold?token=${token}`]) {
    const socket = await new Promise(done => {
      const socket = new WebSocket(agent.replace("http", "ws") + path);
      Object.assign(socket, { onopen: () => done(true), onerror: () => done(false) });
    });
    if (socket) succeeded.push(`WebSocket ${path}`);
  }
  // Statistics are for everyone.
  for (const path of ["/gpu/stats", "/health"]) {
    if (!(await fetch(agent + path).then(answer => answer.ok, () => false))) succeeded.push(`${path} was refused`);
  }
  await pause(500);
  open.forEach(abort => abort.abort());
  return succeeded;
}

const browser = await chromium.launch({
  executablePath: browserPath,
  args: ["--no-sandbox", `--host-resolver-rules=MAP ${FOREIGN_SITE} 127.0.0.1`],
});
const agent = await startAgent(binary);
const site = await startSite();

/** What must be so after any attack. */
async function unchanged(lease, name) {
  const state = await read(`${agent.address}/v1/leases?state=all`);
  const known = state.leases.map(({ id, state }) => [id, state]);
  assert.deepEqual(known, [[lease.id, "active"]], `${name} changed the leases`);
  const { devices } = await read(`${agent.address}/v1/devices`);
  assert.deepEqual(devices.filter(device => device.closed?.length), [], `${name} changed the devices`);
  assert.deepEqual((await read(`${agent.address}/v1/tokens`)).tokens, [], `${name} made a token`);
}

try {
  const { port } = new URL(agent.address);
  const lease = await requestLease(agent.address, { ttl_secs: 600 });
  const pages = [
    ["another site", `http://${FOREIGN_SITE}:${site.port}/`],
    ["another port of localhost", `http://localhost:${site.port}/`],
    ["another port of 127.0.0.1", `http://127.0.0.1:${site.port}/`],
  ];
  for (const [name, page] of pages) {
    for (const target of [`http://localhost:${port}`, `http://127.0.0.1:${port}`]) {
      const context = await browser.newContext();
      const tab = await context.newPage();
      const answered = [];
      tab.on("response", answer => answer.url().startsWith(target) && answered.push([answer.request().method(), answer.url(), answer.status()]));
      await tab.goto(page);
      const succeeded = await tab.evaluate(attack, { agent: target, id: lease.id, token: lease.token, guarded: GUARDED });
      assert.deepEqual(succeeded, [], `${name} (${page}) at ${target}`);
      const taken = answered.filter(([, url, status]) => status < 400 && !/\/(gpu\/stats|health)$/.test(url));
      assert.deepEqual(taken, [], `${name} (${page}) at ${target}`);
      assert.ok(answered.length > 20, `${name}: ${answered.length} requests reached the agent`);
      await unchanged(lease, name);
      // A link opens the pages of the agent.
      for (const path of ["/", "/docs", "/redoc"]) {
        await tab.goto(page);
        await tab.evaluate(href => document.body.append(Object.assign(document.createElement("a"), { href, textContent: "open" })), target + path);
        const [opened] = await Promise.all([tab.waitForResponse(target + path), tab.getByText("open").click()]);
        assert.equal(opened.status(), 200, `a link of ${name} to ${path}`);
      }
      await context.close();
    }
    console.log(`fine: attacks from ${name}`);
  }

  // A foreign name that was pointed at this machine: the page is of the same origin, and nothing is answered.
  const rebound = await browser.newPage();
  for (const path of ["/", "/docs", "/gpu/stats", "/health", "/openapi.json", "/v1/events", ...GUARDED]) {
    const answer = await rebound.goto(`http://${FOREIGN_SITE}:${port}${path}`);
    assert.deepEqual([answer.status(), (await answer.json()).code], [403, "host_not_allowed"], path);
  }
  console.log("fine: a foreign name of this machine");

  // The agent's own page may read, and needs a token for changes.
  const { secret } = await requestLease(agent.address, { owner: "alice" }, "/v1/tokens");
  await rebound.goto(`${agent.address}/`);
  const own = await rebound.evaluate(async secret => {
    const post = headers => fetch("/v1/leases", { method: "POST", headers, body: `{"fraction": 0.1}` });
    const bearer = { authorization: `Bearer ${secret}` };
    return [(await fetch("/v1/leases")).status, (await fetch("/metrics")).status, (await post({})).status, (await post(bearer)).status];
  }, secret);
  assert.deepEqual(own, [200, 200, 401, 201]);
  console.log("fine: the agent's own page");
} finally {
  await browser.close();
  await Promise.all([agent.stop(), site.stop()]);
}
