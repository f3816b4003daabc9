//! Log lines on standard error, and a hook that logs panics.

use std::{
    cell::Cell,
    io::{self, IsTerminal},
    panic,
    time::{Duration, Instant},
};

use metrics::Counter;
use tracing::Dispatch;
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    fmt::{self, MakeWriter},
    layer::SubscriberExt as _,
};

use super::{LogFormat, LogLevel, LogSettings, queue::LineQueue};

/// The most bytes of log lines that wait for standard error.
const QUEUE_BYTES: usize = 1024 * 1024;

/// Why logging could not start.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The process already has a subscriber, which stays.
    #[error("logging is already set up")]
    AlreadyInstalled,
    /// The system cannot start a thread.
    #[error("cannot start the log: {0}")]
    Thread(#[from] io::Error),
}

/// Sends log lines of `settings.level` and above to standard error for the rest of the process.
/// Lines go through a queue: a stalled reader loses lines, which `dropped` counts, and blocks
/// nothing. Close the queue before the process ends.
pub fn init(settings: &LogSettings, dropped: Counter) -> Result<LineQueue, LogError> {
    let terminal = io::stderr().is_terminal();
    let queue = LineQueue::start("log", Box::new(io::stderr()), QUEUE_BYTES, dropped)?;
    let writer = queue.clone();
    let dispatch = dispatch(settings, terminal, move || Queued(writer.clone()));
    tracing::dispatcher::set_global_default(dispatch).map_err(|_| LogError::AlreadyInstalled)?;
    Ok(queue)
}

/// The formatter writes each event in one call.
struct Queued(LineQueue);

impl io::Write for Queued {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn dispatch<W>(settings: &LogSettings, terminal: bool, writer: W) -> Dispatch
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    // clients can provoke these libraries' warnings at will; tidegate logs and counts the relevant
    // ones itself
    let level = filter(settings.level);
    let targets = Targets::new().with_default(level).with_targets([
        ("h2", level.min(LevelFilter::ERROR)),
        ("hyper", level.min(LevelFilter::ERROR)),
    ]);
    let builder = fmt::fmt().with_max_level(level).with_writer(writer);
    if settings.format.is_json(terminal) {
        builder
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .finish()
            .with(targets)
            .into()
    } else {
        builder
            .with_ansi(terminal)
            .with_target(false)
            .finish()
            .with(targets)
            .into()
    }
}

/// Limits a log line that any request can trigger to one per second. One per thread and message.
#[derive(Debug, Default)]
pub struct Throttle {
    said: Cell<Option<Instant>>,
    suppressed: Cell<u64>,
}

impl Throttle {
    /// If the line is due, returns how many like it were suppressed since the last one.
    pub fn speak(&self) -> Option<u64> {
        const PAUSE: Duration = Duration::from_secs(1);
        if self.said.get().is_some_and(|said| said.elapsed() < PAUSE) {
            self.suppressed.set(self.suppressed.get().saturating_add(1));
            return None;
        }
        self.said.set(Some(Instant::now()));
        Some(self.suppressed.take())
    }
}

/// Logs and counts every panic, in place of the standard message.
///
/// The hook runs on the panicking thread before it unwinds. The owner of the task decides what ends
/// with it.
pub fn install_panic_hook(panics: Counter) {
    let standard = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        panics.increment(1);
        if !tracing::dispatcher::has_been_set() {
            return standard(info);
        }
        let message = info.payload_as_str().unwrap_or("a value that is not text");
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        match info.location() {
            Some(at) => tracing::error!(
                thread,
                file = at.file(),
                line = at.line(),
                "panic, please report this bug in tidegate: {message}"
            ),
            None => tracing::error!(
                thread,
                "panic, please report this bug in tidegate: {message}"
            ),
        }
    }));
}

impl LogFormat {
    /// Whether lines are JSON; `terminal` says whether they go to a terminal.
    pub fn is_json(self, terminal: bool) -> bool {
        match self {
            LogFormat::Auto => !terminal,
            LogFormat::Text => false,
            LogFormat::Json => true,
        }
    }
}

fn filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::telemetry::test_support::{Captured, ReadableCounter};

    fn logged(format: LogFormat, terminal: bool, act: impl FnOnce()) -> String {
        let kept = Captured::default();
        let writer = kept.clone();
        let settings = LogSettings {
            format,
            ..LogSettings::default()
        };
        let dispatch = dispatch(&settings, terminal, move || writer.clone());
        tracing::dispatcher::with_default(&dispatch, act);
        kept.text()
    }

    #[test]
    fn auto_is_text_on_a_terminal_and_json_elsewhere() {
        let say = || tracing::info!(limit = "per_ip", "the limit is tight");
        let json: serde_json::Value =
            serde_json::from_str(&logged(LogFormat::Auto, false, say)).expect("it is JSON");
        assert_eq!(json["message"], "the limit is tight");
        assert_eq!(json["limit"], "per_ip");
        assert_eq!(json["level"], "INFO");
        assert!(json["timestamp"].is_string());

        let text = logged(LogFormat::Auto, true, say);
        assert!(
            text.contains("the limit is tight") && text.contains('\u{1b}'),
            "{text:?}"
        );
        let plain = logged(LogFormat::Text, false, say);
        assert!(
            plain.contains("the limit is tight") && !plain.contains('\u{1b}'),
            "{plain:?}"
        );
        assert!(logged(LogFormat::Json, true, say).starts_with('{'));
    }

    #[test]
    fn less_severe_lines_are_left_out() {
        assert_eq!(
            logged(LogFormat::Json, false, || tracing::debug!("a detail")),
            ""
        );
    }

    #[test]
    fn panic_is_counted_and_logged_on_one_line() {
        let count = Arc::new(ReadableCounter::default());
        let counted = Counter::from_arc(Arc::clone(&count));
        let text = logged(LogFormat::Json, false, || {
            install_panic_hook(counted);
            let caught = panic::catch_unwind(|| panic!("a\nbug"));
            let _ = panic::take_hook();
            assert!(caught.is_err());
        });
        let line: serde_json::Value = serde_json::from_str(&text).expect("it is one line of JSON");
        assert_eq!(
            line["message"],
            "panic, please report this bug in tidegate: a\nbug"
        );
        assert_eq!(line["level"], "ERROR");
        assert!(
            line["file"]
                .as_str()
                .is_some_and(|file| file.ends_with("log.rs"))
        );
        assert!(count.get() >= 1);
    }
}
