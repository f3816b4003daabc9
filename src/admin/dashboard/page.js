// The page at `/`: polls /api/v1/status every second. Text from clients is inserted as text only, never as markup.
const SPAN = 900; // seconds in the chart
const history = [];
let last = null;
let token = sessionStorage.getItem("token") || "";
let asking = false;

const at = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

async function ask(path, method = "GET", body) {
  const headers = {};
  if (token) headers.authorization = `Bearer ${token}`;
  if (method !== "GET") headers["content-type"] = "application/json";
  const response = await fetch(`/api/v1/${path}`, {
    method, headers, cache: "no-store",
    body: method === "GET" ? undefined : JSON.stringify(body || {}),
  });
  if (response.status === 401) { await login(); throw new Error("a token is needed"); }
  const json = await response.json();
  if (!response.ok) throw new Error(json.error || json.detail || `status ${response.status}`);
  return json;
}

function login() {
  const dialog = at("login");
  if (dialog.open) return new Promise(() => {});
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      token = at("token").value.trim();
      sessionStorage.setItem("token", token);
      done();
    }, { once: true });
    dialog.showModal();
  });
}

const number = (value) => value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value < 10 && value > 0 ? 1 : 0);
const count = (value) => value.toLocaleString("en");
const mebibytes = (bytes) => `${(bytes / 1048576).toFixed(0)} MiB`;
const clock = (moment) => new Date(moment).toLocaleTimeString([], { hour12: false });
const where = (override, status) => override.scope === "all" && status.redis ? "at all gateways on the same Redis" : "at this gateway";
const until = (override) => override.until ? `until ${clock(override.until)}` : "until you end it";

function rate(now, before, seconds) {
  // a restart resets the counters to 0
  return before === undefined || now < before ? 0 : (now - before) / seconds;
}

function show(status) {
  const now = performance.now() / 1000;
  const before = last;
  const seconds = before ? Math.max(now - before.at, 0.1) : 1;
  const perSecond = (pick) => before ? rate(pick(status), pick(before.status), seconds) : 0;
  const requests = perSecond((one) => one.requests_total);
  const rejected = perSecond((one) => one.rejected_total);
  const time = Date.now() / 1000;
  if (!history.length) {
    status.history.slice(1).forEach((one, index) => {
      const old = status.history[index];
      const span = one.at_seconds - old.at_seconds;
      history.push({ time: one.at_seconds, requests: rate(one.requests, old.requests, span), rejected: rate(one.rejected, old.rejected, span) });
    });
  }
  if (before) history.push({ time, requests, rejected });
  while (history.length && history[0].time < time - SPAN) history.shift();

  at("about").textContent = `${status.version}, ${status.state}, configuration ${status.config.hash}`;
  alerts(status);
  at("numbers").replaceChildren(...[
    ["requests/s", number(requests)], ["rejections/s", number(rejected)], ["in flight", count(status.in_flight)],
    ["connections", count(status.connections)], ["requests", count(status.requests_total)], ["memory", mebibytes(status.memory_bytes)],
  ].map(([name, value]) => element("div", {}, element("b", {}, value), element("span", {}, name))));
  chart();
  limits(status, before, seconds);
  top(status);
  latest(status);
  upstreams(status);
  redis(status);
  last = { at: now, status };
}

function alerts(status) {
  const found = [];
  const say = (text, button) => found.push(element("p", {}, element("span", {}, text), button));
  if (status.kill) {
    say(`Every limit is ${status.kill.mode}, ${where(status.kill, status)}, ${until(status.kill)}.`,
      element("button", { type: "button", onclick: () => change("kill", "DELETE", { scope: status.kill.scope }) }, "Enforce again"));
  }
  if (status.state !== "ready") say(`The gateway is ${status.state}.`);
  if (!status.config.last_reload_ok) say("The new configuration was refused; the previous one still runs. See the log.");
  for (const limit of status.limits) {
    const old = last && last.status.limits.find((one) => one.name === limit.name);
    if (old && limit.overflows > old.overflows) say(`${limit.name} has reached its maximum of ${count(limit.keys)} keys: new keys share buckets. Other limits are not affected.`);
  }
  if (status.redis && status.redis.degraded) say("Redis does not answer: each gateway enforces shared limits on its own.");
  for (const upstream of status.upstreams) {
    const down = upstream.servers.filter((server) => !server.healthy);
    if (down.length) say(`${upstream.name}: ${down.length} of ${upstream.servers.length} servers out of service.`);
  }
  // unchanged alerts keep the focus, and screen readers do not repeat them
  const texts = found.map((one) => one.textContent).join("\n");
  if (at("alerts").dataset.said !== texts) {
    at("alerts").dataset.said = texts;
    at("alerts").replaceChildren(...found);
  }
}

function chart() {
  const most = Math.max(1, ...history.map((one) => Math.max(one.requests, one.rejected)));
  const now = Date.now() / 1000;
  const line = (pick) => history.map((one) => `${300 - 300 * (now - one.time) / SPAN},${98 - 94 * pick(one) / most}`).join(" ");
  at("line-requests").setAttribute("points", line((one) => one.requests));
  at("line-rejected").setAttribute("points", line((one) => one.rejected));
  at("scale").textContent = `up to ${number(most)}/s, the last 15 minutes`;
  if (!at("grid").childNodes.length) {
    for (const y of [4, 51, 98]) {
      const grid = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, value] of [["x1", 0], ["x2", 300], ["y1", y], ["y2", y]]) grid.setAttribute(name, value);
      at("grid").append(grid);
    }
  }
}

function rows(table, made, empty) {
  const body = at(table).tBodies[0];
  const columns = at(table).tHead.rows[0].cells.length;
  if (!made.length) made = [element("tr", {}, element("td", { colspan: columns, class: "empty" }, empty))];
  const focused = document.activeElement && body.contains(document.activeElement) ? document.activeElement.textContent : null;
  body.replaceChildren(...made);
  if (focused) [...body.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
}

function limits(status, before, seconds) {
  rows("limits", status.limits.map((limit) => {
    const old = before && before.status.limits.find((one) => one.name === limit.name);
    const per = (outcome) => old ? rate(limit.decisions[outcome], old.decisions[outcome], seconds) : 0;
    const would = per("shadow_rejected") + per("tagged");
    const overridden = limit.runtime_override || (status.kill ? status.kill : null);
    const mode = element("span", { class: `badge ${overridden ? "bad" : limit.mode === "enforce" ? "good" : "warn"}` }, limit.mode);
    const button = limit.runtime_override
      ? element("button", { type: "button", onclick: () => setMode(limit.name, { mode: "configured", scope: limit.runtime_override.scope }) }, `Back to ${limit.configured_mode}`)
      : element("button", { type: "button", class: "danger", onclick: () => confirmOff(limit.name) }, "Switch off…");
    const quota = limit.quotas.map((one) => (one.tiers.length ? `${one.tiers.join(", ")}: ` : "") + one.rate).join("; ");
    const per_key = limit.key.length ? `per ${limit.key.join(" + ")}` : "for all clients together";
    return element("tr", {},
      element("td", {}, element("b", {}, limit.name), element("br"), element("small", {}, `${quota} ${per_key}${limit.scope === "global" ? ", shared with other gateways" : ", this gateway only"}`), limit.gateways_disagree ? element("small", { class: "warn" }, element("br"), "gateways count it differently") : null),
      element("td", {}, mode, limit.runtime_override ? element("small", {}, element("br"), `${where(limit.runtime_override, status)}, ${until(limit.runtime_override)}`) : null),
      element("td", { class: "n" }, number(per("admitted") + per("delayed"))),
      element("td", { class: "n" }, number(per("rejected")), would ? element("small", {}, element("br"), `${number(would)} would be`) : null),
      element("td", { class: "n" }, number(old ? rate(limit.near_limit, old.near_limit, seconds) : 0)),
      element("td", { class: "n" }, count(limit.keys), limit.overflows ? element("small", {}, element("br"), `${count(limit.overflows)} over the maximum`) : null),
      element("td", {}, button));
  }), "no limits configured");
}

const searchFor = (text) => () => { at("wanted").value = text; search(); };

function top(status) {
  const keys = status.limits.flatMap((limit) => limit.top.map((one) => ({ ...one, limit: limit.name })));
  keys.sort((one, other) => other.rejected_last_minute - one.rejected_last_minute);
  rows("top", keys.slice(0, 15).map((one) => element("tr", {},
    element("td", {}, element("button", { type: "button", class: "link", onclick: searchFor(one.key) }, one.key)),
    element("td", {}, one.limit),
    element("td", { class: "n" }, count(one.rejected_last_minute)))), "no rejections");
}

function latest(status) {
  rows("latest", status.latest.map((one) => element("tr", {},
    element("td", {}, clock(one.at)),
    element("td", {}, element("code", {}, `${one.method} ${one.path}`)),
    element("td", {}, one.limit || ""),
    element("td", {}, element("code", {}, one.key || "")),
    element("td", {}, element("button", { type: "button", class: "link", "aria-label": `Why was ${one.request_id} rejected?`, onclick: searchFor(one.request_id) }, "why?")))),
  "no recent rejections");
}

function upstreams(status) {
  at("upstreams").replaceChildren(...status.upstreams.flatMap((upstream) => upstream.servers.map((server) => element("li", {},
    element("span", { class: server.healthy ? "good" : "bad" }, server.healthy ? "● " : "○ "),
    `${upstream.name} `, element("code", {}, server.name), ` ${server.healthy ? "in service" : "out of service"}`))));
}

function redis(status) {
  const one = status.redis;
  const line = (...text) => element("li", {}, ...text);
  at("redis").replaceChildren(...(one ? [
    line(element("span", { class: one.degraded ? "bad" : "good" }, one.degraded ? "○ does not answer" : "● answers")),
    line(`${count(one.gateways)} gateways share limits`),
    line(`calls: ${count(one.calls.ok)} ok, ${count(one.calls.late)} late, ${count(one.calls.error)} failed`),
  ] : [element("li", { class: "empty" }, "not configured: this gateway enforces its limits alone")]));
}

async function change(path, method, body) {
  try { await ask(path, method, body); await tick(); } catch (error) { answer(error.message); }
}

const setMode = (limit, body) => change(`limits/${encodeURIComponent(limit)}/mode`, "PUT", body);

let toStop = null; // the limit in the open dialog, null for all

function confirmOff(limit) {
  toStop = limit;
  at("confirm-title").textContent = limit ? `Switch ${limit} off?` : "Switch all limits off?";
  at("confirm-text").textContent = limit
    ? "This limit will reject no requests."
    : "No limit will protect your upstreams, even after a reload.";
  const others = last && last.status.redis;
  at("confirm-where").hidden = !others;
  at("confirm-reach").textContent = others
    ? "The change reaches all gateways on the same Redis within seconds, including limits that they do not share. You can choose this gateway only."
    : "The change applies to this gateway, which shares no limits with others.";
  at("confirm").showModal();
}

// handles the form's `submit`, not the dialog's `close`: that fires later, perhaps after the next dialog opened
function confirmed(event) {
  if (event.submitter.value !== "yes") return;
  const body = { mode: at("confirm-mode").value, for: at("confirm-for").value, scope: at("confirm-scope").value };
  if (toStop) setMode(toStop, body);
  else change("kill", "PUT", body);
}

function answer(...what) {
  at("answer").replaceChildren(...what.map((one) => (one instanceof Node ? one : element("p", {}, one))));
}

async function search() {
  const wanted = at("wanted").value.trim();
  if (!wanted) return;
  try {
    if (/^[\x21-\x7e]+$/.test(wanted) && !wanted.includes("/") && !wanted.includes("=")) {
      const one = await ask(`decisions/${encodeURIComponent(wanted)}`).catch(() => null);
      if (one) return answer(element("p", {}, `${one.outcome} at ${clock(one.at)}`), element("pre", {}, one.text));
    }
    const found = [];
    for (const limit of last ? last.status.limits : []) {
      const key = await ask(`limits/${encodeURIComponent(limit.name)}/keys/${encodeURIComponent(wanted)}`).catch(() => null);
      if (key) found.push(bucket(key));
    }
    const list = await ask(`decisions?key=${encodeURIComponent(wanted)}&outcome=rejected`);
    for (const one of list.decisions.slice(0, 10)) {
      found.push(element("p", {}, `${clock(one.at)} ${one.method} ${one.path} `,
        element("button", { type: "button", class: "link", onclick: searchFor(one.request_id) }, one.request_id)));
    }
    answer(...(found.length ? found : ["Nothing found: neither a remembered request ID nor a key of a limit."]));
  } catch (error) { answer(error.message); }
}

function bucket(key) {
  const changes = key.banned ? ", banned" : key.boost ? `, ${key.boost.left} units left of a boost` : "";
  const named = element("p", {}, element("b", {}, key.limit), " ", element("code", {}, key.key), ": ");
  const exception = key.override;
  if (key.quota_from === "exempt" || (exception && exception.effect === "exempt")) {
    named.append(`exempt from the limit${exception ? ` (override for ${exception.for})` : ""}${changes}`);
    return named;
  }
  if (exception && exception.effect === "block") {
    named.append(`blocked (override for ${exception.for})${changes}`);
    return named;
  }
  const stands = (one) => `${one.spent} of ${one.capacity} spent, ${one.remaining} left, full again in ${Math.ceil(one.reset_seconds)} s`;
  const tier = (name) => name === null ? "default tier" : `tier ${name}`;
  const why = { override: () => ` (override for ${exception.for})`, asked: () => ` (${tier(key.tier)})`, last_seen: () => ` (${tier(key.tier)}, as last seen)` }[key.quota_from];
  if (key.quota_from === "unknown") {
    named.append(`tier unknown${changes}`, element("ul", {}, ...key.tiers.map((one) => element("li", {}, `${tier(one.tier)}, ${one.rate}: ${stands(one)}`))));
  } else named.append(`${stands(key)}${why ? why() : ""}${changes}`);
  return named;
}

async function tick() {
  if (asking || document.hidden) return;
  asking = true;
  try { show(await ask("status")); } catch (error) {
    at("about").textContent = `no answer: ${error.message}`;
    last = null;
  } finally { asking = false; }
}

at("search").addEventListener("submit", (event) => { event.preventDefault(); search(); });
at("confirm").querySelector("form").addEventListener("submit", confirmed);
at("kill-all").addEventListener("click", () => confirmOff(null));
at("config").addEventListener("toggle", async () => {
  if (!at("config").open) return;
  const shown = at("config").querySelector("pre");
  try { shown.textContent = JSON.stringify((await ask("config")).config, null, 2); } catch (error) { shown.textContent = error.message; }
});
document.addEventListener("visibilitychange", () => { last = null; tick(); });
tick();
setInterval(tick, 1000);
