// The pages of an agent in a browser: `pages.mjs HOME BROWSER BINARY`, see `run`.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

import { ask, spoil, startAgent } from "./agent.mjs";

const [home, browserPath, binary] = process.argv.slice(2);
const { chromium } = createRequire(join(home, "package.json"))("playwright-core");
const HOSTILE = `<img src=x onerror="window.broken=1"><script>window.broken=1</script>`;

const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox"] });

/** Opens a page where nothing but the agent can be reached, lets `check` look at it, and says what it tried to reach. */
async function look(name, address, path, options, check) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const outside = [], complaints = [];
  const origin = new URL(address).origin;
  await context.route(() => true, (route, request) => {
    const url = request.url();
    if (url.startsWith(origin + "/") || /^(data|blob):/.test(url)) return route.continue();
    outside.push(url);
    return route.abort();
  });
  const page = await context.newPage();
  page.on("request", request => {
    const url = request.url();
    if (!url.startsWith(origin + "/") && !/^(data|blob):/.test(url)) outside.push(url);
  });
  page.on("console", message => message.type() === "error" && complaints.push(message.text()));
  page.on("pageerror", error => complaints.push(String(error)));
  page.on("requestfailed", request => complaints.push(`${request.url()}: ${request.failure()?.errorText}`));
  const answer = await page.goto(address + path);
  assert.equal(answer.status(), 200, `${name}: ${address}${path}`);
  assert.match(answer.headers()["content-security-policy"] ?? "", /default-src 'none'/, name);
  await check(page);
  await page.screenshot({ path: join(home, `${name}.png`) });
  assert.deepEqual(outside, [], `${name} reaches outside`);
  assert.deepEqual(complaints, [], `${name} complains`);
  await context.close();
  console.log(`fine: ${name} (${address}${path})`);
}

async function documentation(agent, { docs, redoc }, suffix) {
  await look(`docs${suffix}`, agent.address, docs, {}, async page => {
    await page.getByRole("heading", { name: "gpupool" }).waitFor();
    await page.getByText("/v1/leases/{id}/renew").first().waitFor();
    // A route opened to its end: schemas, examples and all.
    await page.getByText("/v1/leases/{id}/renew").first().click();
    await page.getByRole("button", { name: "Try it out" }).click();
  });
  await look(`docs-asks${suffix}`, agent.address, `${docs}#/statistics/count`, {}, async page => {
    await page.getByRole("button", { name: "Try it out" }).click();
    await page.getByRole("button", { name: "Execute" }).click();
    await page.locator(".live-responses-table .response-col_status", { hasText: "200" }).waitFor();
  });
  await look(`redoc${suffix}`, agent.address, redoc, {}, async page => {
    await page.getByRole("heading", { name: /^gpupool/ }).first().waitFor();
    await page.getByText("/v1/leases/{id}/renew").first().waitFor({ state: "attached" });
    await page.getByRole("searchbox").or(page.getByPlaceholder("Search...")).first().fill("renew");
    await page.locator("[data-role='search:results'] li").first().waitFor();
  });
}

/** The document says what it is, how to be known, and how errors look; what changes something can fail. */
async function documentItself(agent) {
  const document = await (await fetch(`${agent.address}/openapi.json`)).json();
  assert.match(document.openapi, /^3\.1\./);
  assert.equal(document.components.securitySchemes.token.scheme, "bearer");
  const names = Object.values(document.paths).flatMap(Object.values).map(operation => operation.operationId);
  assert.equal(new Set(names).size, names.length, `a name stands for two operations: ${names}`);
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, { responses }] of Object.entries(methods)) {
      if (method === "get" || !path.startsWith("/v1/")) continue;
      const problem = responses.default?.content?.["application/problem+json"];
      assert.ok(problem, `${method} ${path} does not say how it fails`);
    }
  }
  const { endpoints } = await (await fetch(agent.address)).json();
  const prefix = new URL(agent.address).pathname.replace(/\/$/, "");
  assert.deepEqual(Object.keys(endpoints).sort(), Object.keys(document.paths).map(path => prefix + path).sort());
}

async function frontPage(agent, suffix) {
  for (const colorScheme of ["light", "dark"]) {
    await look(`front-${colorScheme}${suffix}`, agent.address, "", { colorScheme }, async page => {
      await page.locator("#health", { hasText: "healthy" }).waitFor();
      await page.locator("#gpus .card").nth(3).waitFor();
      await page.locator("#gpus .who", { hasText: HOSTILE }).first().waitFor();
      await page.locator("#gpus .warn", { hasText: "pid 4242" }).first().waitFor();
      await page.locator("#gpus .pill", { hasText: "used without a lease" }).first().waitFor();
      await page.locator("#queue td", { hasText: "waits-long" }).waitFor();
      // Told by the stream of events, without asking again.
      const lease = await ask(agent.address, { fraction: 0.1, worker_id: `${HOSTILE}-${colorScheme}` });
      await page.locator("#events td", { hasText: `lease ${lease.id}` }).first().waitFor();
      assert.equal(await page.evaluate(() => window.broken), undefined, "what others wrote was run");
      for (const link of await page.locator("nav a").all()) {
        const answer = await page.request.get(await link.evaluate(node => node.href));
        assert.equal(answer.status(), 200, await link.getAttribute("href"));
      }
    });
  }
}

try {
  const plain = await startAgent(binary);
  const placed = await startAgent(binary, { API_PREFIX: "/box/gpu", DOCS_URL: "/help/swagger", REDOC_URL: "/reference" });
  try {
    for (const agent of [plain, placed]) {
      await ask(agent.address, { worker_id: HOSTILE, ttl_secs: 600 });
      await ask(agent.address, { fraction: 0.5, memory_mib: 20000, worker_id: "train-7", ttl_secs: 600 });
      await ask(agent.address, { fraction: 0.25, worker_id: "notebook", ttl_secs: 600 });
      await spoil(agent.address, { gpu_id: 3, fault: "squatter:4242:9000:60" });
      // Somebody who waits stays in the queue only while the answer is awaited; it comes when the agent ends.
      ask(agent.address, { gpus: 4, worker_id: "waits-long", wait_secs: 300 }).catch(() => {});
    }
    await documentItself(plain);
    await documentItself(placed);
    await documentation(plain, { docs: "/docs", redoc: "/redoc" }, "");
    await documentation(placed, { docs: "/help/swagger", redoc: "/reference" }, "-placed");
    await frontPage(plain, "");
    await frontPage(placed, "-placed");
    await look("front-slash", `${placed.address}/`, "", {}, page => page.locator("#gpus .card").nth(3).waitFor());
  } finally {
    await Promise.all([plain.stop(), placed.stop()]);
  }
} finally {
  await browser.close();
}
