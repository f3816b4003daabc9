//! Access log: one line per request or per rejection.
//!
//! A worker formats the line into its own buffer and appends it to a [`LineQueue`]. The lock is
//! held only for that copy.
//!
//! A channel of lines was rejected, because it allocates and wakes the writer for each line. The
//! queue wakes its writer only when it was empty, and the writer waits briefly for more lines. So a
//! busy gateway pays one wake-up for many lines.

use std::{
    cell::RefCell,
    fmt::Display,
    io::Write,
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, SystemTime},
};

use metrics::Counter;

use super::{json, queue::LineQueue, time::rfc3339_millis};

/// The most bytes of one value; a longer value is cut and ends in `…`.
pub const VALUE_MAX_BYTES: usize = 1024;

/// The format of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// `timestamp name=value …`
    Text,
    /// One JSON object per line.
    Json,
}

/// The facts about one request when its response is complete. Empty options are omitted from the
/// line.
#[derive(Clone, Copy, Debug)]
pub struct AccessLine<'a> {
    /// When the request arrived.
    pub time: SystemTime,
    /// `X-Request-Id`.
    pub request_id: &'a [u8],
    /// The client's address, if the request could be read far enough. A peer on a Unix socket
    /// counts as 127.0.0.1.
    pub client_ip: Option<IpAddr>,
    /// The verified user.
    pub user: Option<&'a [u8]>,
    /// The user's tenant.
    pub tenant: Option<&'a [u8]>,
    /// The user's tier.
    pub tier: Option<&'a [u8]>,
    /// The method as sent.
    pub method: &'a [u8],
    /// The requested host.
    pub host: Option<&'a [u8]>,
    /// The path as sent, without the query (which often carries secrets).
    pub path: &'a [u8],
    /// The route that matched.
    pub route: Option<&'a str>,
    /// The response status.
    pub status: u16,
    /// The binding limit of the request.
    pub limit: Option<LimitPart<'a>>,
    /// Where the request was forwarded, if it was.
    pub went: Option<AccessUpstream<'a>>,
    /// What it cost, if a limit counts costs.
    pub cost: Option<CostPart<'a>>,
    /// Why the gateway did not serve it, apart from limits: the `error` of the response body.
    pub error: Option<&'static str>,
    /// The trace ID, if the request has a span.
    pub trace: Option<u128>,
    /// Rejections before this one that got no line because of the cap.
    pub lines_dropped: u64,
    /// Bytes of the response body.
    pub bytes: u64,
    /// From the request's arrival to the end of its response.
    pub duration: Duration,
}

/// The binding limit, for the access line.
#[derive(Clone, Copy, Debug)]
pub struct LimitPart<'a> {
    /// Its name.
    pub name: &'a str,
    /// The key: readable for addresses and users. The caller hashes values that may be secret.
    pub key: &'a [u8],
    /// The algorithm, as in the configuration.
    pub algorithm: &'a str,
    /// The scope of its counters: `local` or `global`.
    pub scope: &'static str,
    /// Its current mode: `enforce`, `shadow`, `tag` or `off`.
    pub mode: &'static str,
    /// Bucket size in units.
    pub capacity: u64,
    /// Units left.
    pub remaining: u64,
    /// `Retry-After` in seconds, for a rejection that can succeed later.
    pub retry_after: Option<u32>,
    /// What decided: `local`, `lease`, `redis` or `fallback`.
    pub source: &'static str,
}

/// What a request cost, for the access line.
#[derive(Clone, Copy, Debug)]
pub struct CostPart<'a> {
    /// Units.
    pub cost: u64,
    /// Units held at last, before they were settled.
    pub held: u64,
    /// The source of the cost, as in `tidegate_cost_settled_total`.
    pub source: &'static str,
    /// The unit of the limit.
    pub unit: &'a str,
    /// The model that answered, or that the request names.
    pub model: Option<&'a str>,
    /// Reported tokens: input, the part of it from a cache, and output.
    pub tokens: Option<[u64; 3]>,
}

/// Where the request was forwarded, for the access line.
#[derive(Clone, Copy, Debug)]
pub struct AccessUpstream<'a> {
    /// The upstream.
    pub upstream: &'a str,
    /// The last server that was tried.
    pub server: Option<&'a str>,
    /// The error, if any: a `kind` of `tidegate_upstream_errors_total`.
    pub error: Option<&'static str>,
}

/// Writes access lines. Clones are cheap and share one writer thread.
#[derive(Clone, Debug)]
pub struct AccessLog {
    queue: LineQueue,
    style: Style,
}

/// Caps the lines per second over all workers, so a flood of rejections does not flood the log.
#[derive(Debug, Default)]
pub struct LineCap {
    /// The current second and its line count, 32 bits each.
    now: AtomicU64,
    lines_dropped: AtomicU64,
}

impl LineCap {
    /// Whether another line may be written in this second. If so, returns how many were left out
    /// before it.
    pub fn admit(&self, second: u64, most: u32) -> Option<u64> {
        let this = second << 32;
        let mut now = self.now.load(Relaxed);
        loop {
            let lines = if now >> 32 == this >> 32 {
                now & 0xffff_ffff
            } else {
                0
            };
            if lines >= u64::from(most) {
                self.lines_dropped.fetch_add(1, Relaxed);
                return None;
            }
            let taken = self
                .now
                .compare_exchange_weak(now, this | (lines + 1), Relaxed, Relaxed);
            match taken {
                Ok(_) => return Some(self.lines_dropped.swap(0, Relaxed)),
                Err(other) => now = other,
            }
        }
    }
}

thread_local! {
    /// The buffer in which this thread formats lines.
    static LINE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl AccessLog {
    /// Starts the writer thread. `max_bytes` bounds the lines that wait for `sink`; `dropped`
    /// counts lost lines.
    ///
    /// Fails if the system cannot start a thread.
    pub fn start(
        style: Style,
        sink: Box<dyn Write + Send>,
        max_bytes: usize,
        dropped: Counter,
    ) -> std::io::Result<AccessLog> {
        let queue = LineQueue::start("access-log", sink, max_bytes, dropped)?;
        Ok(AccessLog { queue, style })
    }

    /// Queues one line. Never waits for the sink: if the queue is full, the line is dropped and
    /// counted.
    pub fn write(&self, line: &AccessLine<'_>) {
        let queued = LINE.try_with(|text| {
            let mut text = text.borrow_mut();
            text.clear();
            format(&mut text, self.style, line);
            self.queue.push(&text);
        });
        if queued.is_err() {
            // the thread is ending, so its buffer is gone
            self.queue.lost_one();
        }
    }

    /// Lets the writer drain the queue and stop. Later lines are dropped and counted.
    ///
    /// Waits at most `limit`. Returns whether every line was handed to the sink.
    pub fn close(&self, limit: Duration) -> bool {
        self.queue.close(limit)
    }
}

fn format(out: &mut Vec<u8>, style: Style, line: &AccessLine<'_>) {
    let mut fields = AccessFields { out, style };
    fields.begin(line.time);
    fields.string("request_id", line.request_id);
    if let Some(ip) = line.client_ip {
        fields.string_of("client_ip", ip);
    }
    fields.optional("user", line.user);
    fields.optional("tenant", line.tenant);
    fields.optional("tier", line.tier);
    fields.string("method", line.method);
    fields.optional("host", line.host);
    fields.string("path", line.path);
    fields.optional("route", line.route.map(str::as_bytes));
    fields.number("status", line.status);
    if let Some(limit) = line.limit {
        fields.string("limit", limit.name.as_bytes());
        fields.string("key", limit.key);
        fields.string("algorithm", limit.algorithm.as_bytes());
        fields.string("scope", limit.scope.as_bytes());
        fields.string("mode", limit.mode.as_bytes());
        fields.number("capacity", limit.capacity);
        fields.number("remaining", limit.remaining);
        if let Some(seconds) = limit.retry_after {
            fields.number("retry_after", seconds);
        }
        fields.string("source", limit.source.as_bytes());
    }
    if let Some(went) = line.went {
        fields.string("upstream", went.upstream.as_bytes());
        fields.optional("server", went.server.map(str::as_bytes));
        fields.optional("upstream_error", went.error.map(str::as_bytes));
    }
    if let Some(cost) = line.cost {
        fields.number("cost", cost.cost);
        fields.number("cost_held", cost.held);
        fields.string("cost_source", cost.source.as_bytes());
        fields.string("unit", cost.unit.as_bytes());
        fields.optional("model", cost.model.map(str::as_bytes));
        if let Some([input, cached, output]) = cost.tokens {
            fields.number("tokens_in", input);
            fields.number("tokens_cached", cached);
            fields.number("tokens_out", output);
        }
    }
    fields.optional("error", line.error.map(str::as_bytes));
    fields.number("bytes", line.bytes);
    fields.number(
        "seconds",
        format_args!(
            "{}.{:06}",
            line.duration.as_secs(),
            line.duration.subsec_micros()
        ),
    );
    if let Some(trace) = line.trace {
        fields.string_of("trace_id", format_args!("{trace:032x}"));
    }
    if line.lines_dropped > 0 {
        fields.number("lines_dropped", line.lines_dropped);
    }
    fields.end();
}

struct AccessFields<'a> {
    out: &'a mut Vec<u8>,
    style: Style,
}

impl AccessFields<'_> {
    fn begin(&mut self, time: SystemTime) {
        let time = rfc3339_millis(time);
        match self.style {
            Style::Text => self.out.extend_from_slice(&time),
            Style::Json => {
                self.out.extend_from_slice(b"{\"timestamp\":\"");
                self.out.extend_from_slice(&time);
                self.out.push(b'"');
            }
        }
    }

    fn name(&mut self, name: &str) {
        match self.style {
            Style::Text => {
                self.out.push(b' ');
                self.out.extend_from_slice(name.as_bytes());
                self.out.push(b'=');
            }
            Style::Json => {
                self.out.extend_from_slice(b",\"");
                self.out.extend_from_slice(name.as_bytes());
                self.out.extend_from_slice(b"\":");
            }
        }
    }

    fn string(&mut self, name: &str, value: &[u8]) {
        self.name(name);
        if self.style == Style::Text && is_plain(value) {
            self.out.extend_from_slice(value);
        } else {
            json::put_string(self.out, value, VALUE_MAX_BYTES);
        }
    }

    fn optional(&mut self, name: &str, value: Option<&[u8]>) {
        if let Some(value) = value {
            self.string(name, value);
        }
    }

    /// Adds a value whose text needs no escaping.
    fn string_of(&mut self, name: &str, value: impl Display) {
        match self.style {
            Style::Text => self.number(name, value),
            Style::Json => self.number(name, format_args!("\"{value}\"")),
        }
    }

    fn number(&mut self, name: &str, value: impl Display) {
        self.name(name);
        // writing to a Vec cannot fail
        let _ = write!(self.out, "{value}");
    }

    fn end(&mut self) {
        let end: &[u8] = match self.style {
            Style::Text => b"\n",
            Style::Json => b"}\n",
        };
        self.out.extend_from_slice(end);
    }
}

/// Whether a value is unambiguous without quotes.
fn is_plain(value: &[u8]) -> bool {
    !value.is_empty()
        && value.len() <= VALUE_MAX_BYTES
        && value
            .iter()
            .all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b'='))
}

#[cfg(test)]
mod tests;
