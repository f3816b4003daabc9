//! Observability: metrics, access lines, log lines and spans.

pub mod access;
pub mod cost;
pub mod handles;
mod histogram;
mod install;
pub mod json;
pub mod log;
pub mod metric_table;
pub mod metrics;
mod otlp;
mod otlp_messages;
mod process;
pub mod queue;
mod samples;
mod time;
pub mod trace;
#[cfg(test)]
mod test_support;

pub use self::{
    metrics::Metrics,
    process::resident_bytes,
    samples::Sample,
    time::{date, moment},
};

/// Settings of `[log]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// The least severe level that is logged.
    pub level: LogLevel,
    /// Text or JSON.
    pub format: LogFormat,
    /// The requests that get an access line.
    pub access: AccessLines,
    /// With [`AccessLines::Rejected`]: how many of a million other requests get a line too.
    pub sample_ppm: u32,
    /// The most lines about rejections in one second.
    pub max_rejected: u32,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self {
            level: LogLevel::default(),
            format: LogFormat::default(),
            access: AccessLines::default(),
            sample_ppm: 0,
            max_rejected: 1_000,
        }
    }
}

/// The least severe level that is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevel {
    /// Only problems that need a person.
    Error,
    /// Also problems that may need one soon.
    Warn,
    /// Also changes of state.
    #[default]
    Info,
    /// Also details for developers.
    Debug,
    /// Everything.
    Trace,
}

/// Text or JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON otherwise.
    #[default]
    Auto,
    /// Text.
    Text,
    /// One JSON object per line.
    Json,
}

/// The requests that get an access line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessLines {
    /// Every request.
    All,
    /// Requests that a limit rejected, and a sample of the others.
    #[default]
    Rejected,
    /// None.
    Off,
}
