// Tests the pages of an agent in a browser: `pages.mjs HOME BROWSER BINARY`, see `run`.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

import { injectFault, requestLease, startAgent } from "./agent.mjs";

const [home, browserPath, binary] = process.argv.slice(2);
const { chromium } = createRequire(join(home, "package.json"))("playwright-core");
const HOSTILE = `<img src=x onerror="window.broken=1"><script>window.broken=1</script>`;

const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox"] });

/** Opens a page with access to the agent only, runs `check` on it, and asserts that it requested nothing else. */
async function checkPage(name, address, path, options, check) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const outside = [], errors = [];
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
  page.on("console", message => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", error => errors.push(String(error)));
  page.on("requestfailed", request => errors.push(`${request.url()}: ${request.failure()?.errorText}`));
  const response = await page.goto(address + path);
  assert.equal(response.status(), 200, `${name}: ${address}${path}`);
  assert.match(response.headers()["content-security-policy"] ?? "", /default-src 'none'/, name);
  await check(page);
  await page.screenshot({ path: join(home, `${name}.png`) });
  assert.deepEqual(outside, [], `${name} made requests to other servers`);
  assert.deepEqual(errors, [], `${name} reported errors`);
  await context.close();
  console.log(`passed: ${name} (${address}${path})`);
}

async function documentation(agent, { docs, redoc }, suffix) {
  await checkPage(`docs${suffix}`, agent.address, docs, {}, async page => {
    await page.getByRole("heading", { name: "gpupool" }).waitFor();
    await page.getByText("/v1/leases/{id}/renew").first().waitFor();
    // Opens a route with its schemas and examples.
    await page.getByText("/v1/leases/{id}/renew").first().click();
    await page.getByRole("button", { name: "Try it out" }).click();
  });
  await checkPage(`docs-asks${suffix}`, agent.address, `${docs}#/statistics/count`, {}, async page => {
    await page.getByRole("button", { name: "Try it out" }).click();
    await page.getByRole("button", { name: "Execute" }).click();
    await page.locator(".live-responses-table .response-col_status", { hasText: "200" }).waitFor();
  });
  await checkPage(`redoc${suffix}`, agent.address, redoc, {}, async page => {
    await page.getByRole("heading", { name: /^gpupool/ }).first().waitFor();
    await page.getByText("/v1/leases/{id}/renew").first().waitFor({ state: "attached" });
    await page.getByRole("searchbox").or(page.getByPlaceholder("Search...")).first().fill("renew");
    await page.locator("[data-role='search:results'] li").first().waitFor();
  });
}

/** Checks that the document has a version, a security scheme, unique operation ids, and an error for each change. */
async function checkDocument(agent) {
  const document = await (await fetch(`${agent.address}/openapi.json`)).json();
  assert.match(document.openapi, /^3\.1\./);
  assert.equal(document.components.securitySchemes.token.scheme, "bearer");
  const names = Object.values(document.paths).flatMap(Object.values).map(operation => operation.operationId);
  assert.equal(new Set(names).size, names.length, `an operation id is not unique: ${names}`);
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, { responses }] of Object.entries(methods)) {
      if (method === "get" || !path.startsWith("/v1/")) continue;
      const problem = responses.default?.content?.["application/problem+json"];
      assert.ok(problem, `${method} ${path} has no error response`);
    }
  }
  const { endpoints } = await (await fetch(agent.address)).json();
  const prefix = new URL(agent.address).pathname.replace(/\/$/, "");
  assert.deepEqual(Object.keys(endpoints).sort(), Object.keys(document.paths).map(path => prefix + path).sort());
}

async function frontPage(agent, suffix) {
  for (const colorScheme of ["light", "dark"]) {
    await checkPage(`front-${colorScheme}${suffix}`, agent.address, "", { colorScheme }, async page => {
      await page.locator("#health", { hasText: "healthy" }).waitFor();
      await page.locator("#gpus .card").nth(3).waitFor();
      await page.locator("#gpus .label", { hasText: HOSTILE }).first().waitFor();
      await page.locator("#gpus .warn", { hasText: "squatter" }).first().waitFor();
      await page.locator("#gpus .pill", { hasText: "used without a lease" }).first().waitFor();
      await page.locator("#queue td", { hasText: "waits-long" }).waitFor();
      // Arrives through the event stream, without a refresh.
      const lease = await requestLease(agent.address, { fraction: 0.1, worker_id: `${HOSTILE}-${colorScheme}` });
      await page.locator("#events td", { hasText: `lease ${lease.id}` }).first().waitFor();
      assert.equal(await page.evaluate(() => window.broken), undefined, "foreign text was executed");
      for (const link of await page.locator("nav a").all()) {
        const response = await page.request.get(await link.evaluate(node => node.href));
        assert.equal(response.status(), 200, await link.getAttribute("href"));
      }
    });
  }
}

try {
  const plain = await startAgent(binary);
  const placed = await startAgent(binary, { API_PREFIX: "/box/gpu", DOCS_URL: "/help/swagger", REDOC_URL: "/reference" });
  try {
    for (const agent of [plain, placed]) {
      await requestLease(agent.address, { worker_id: HOSTILE, ttl_secs: 600 });
      await requestLease(agent.address, { fraction: 0.5, memory_mib: 20000, worker_id: "train-7", ttl_secs: 600 });
      await requestLease(agent.address, { fraction: 0.25, worker_id: "notebook", ttl_secs: 600 });
      await injectFault(agent.address, { gpu_id: 3, fault: "squatter:4242:9000:60" });
      // A waiter stays in the queue only while its response is awaited. The response comes when the agent stops.
      requestLease(agent.address, { gpus: 4, worker_id: "waits-long", wait_secs: 300 }).catch(() => {});
    }
    await checkDocument(plain);
    await checkDocument(placed);
    await documentation(plain, { docs: "/docs", redoc: "/redoc" }, "");
    await documentation(placed, { docs: "/help/swagger", redoc: "/reference" }, "-placed");
    await frontPage(plain, "");
    await frontPage(placed, "-placed");
    await checkPage("front-slash", `${placed.address}/`, "", {}, page => page.locator("#gpus .card").nth(3).waitFor());
  } finally {
    await Promise.all([plain.stop(), placed.stop()]);
  }
} finally {
  await browser.close();
}
