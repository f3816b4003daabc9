//! Log lines on standard error, and the hook that turns a panic into one.

use std::{
    io::{self, IsTerminal},
    panic,
};

use metrics::Counter;
use tracing_subscriber::{filter::LevelFilter, fmt, util::SubscriberInitExt};

use super::{LogFormat, LogLevel, LogSettings};

/// Another subscriber is already installed in this process; it stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("logging is already set up")]
pub struct AlreadyInstalled;

/// Sends log lines of `settings.level` and worse to standard error for the rest of the process.
pub fn init(settings: &LogSettings) -> Result<(), AlreadyInstalled> {
    let terminal = io::stderr().is_terminal();
    let builder = fmt()
        .with_max_level(filter(settings.level))
        .with_writer(io::stderr);
    let installed = if settings.format.is_json(terminal) {
        builder
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .finish()
            .try_init()
    } else {
        builder
            .with_ansi(terminal)
            .with_target(false)
            .finish()
            .try_init()
    };
    installed.map_err(|_| AlreadyInstalled)
}

/// Logs and counts every panic from now on, in place of the standard message.
///
/// The hook runs on the panicking thread before it unwinds; whoever owns the task decides what ends with it.
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
                "panic, a bug in tidegate: {message}"
            ),
            None => tracing::error!(thread, "panic, a bug in tidegate: {message}"),
        }
    }));
}

impl LogFormat {
    /// Whether lines are JSON, given whether they go to a terminal.
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
    use super::*;

    #[test]
    fn auto_is_text_on_a_terminal_and_json_elsewhere() {
        assert!(!LogFormat::Auto.is_json(true));
        assert!(LogFormat::Auto.is_json(false));
        assert!(!LogFormat::Text.is_json(false));
        assert!(LogFormat::Json.is_json(true));
    }
}
