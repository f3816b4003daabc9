//! What the gateway lets an operator see: metrics, access lines, log lines, spans.

pub mod access;
pub mod handles;
mod histogram;
pub mod json;
pub mod log;
pub mod metrics;
mod otlp;
mod otlp_messages;
mod process;
pub mod queue;
mod samples;
mod time;
pub mod trace;
#[cfg(test)]
mod witness;

pub use self::{
    metrics::Metrics,
    samples::Sample,
    time::{date, moment},
};

/// `[log]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// The least severe level that is written.
    pub level: LogLevel,
    /// Text or JSON.
    pub format: LogFormat,
    /// Which requests get an access line.
    pub access: AccessLines,
    /// With [`AccessLines::Rejected`]: of a million other requests, so many get one, too.
    pub sample_ppm: u32,
    /// Lines about rejections in one second, at the most.
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

/// The least severe level that is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevel {
    /// Only what needs a person.
    Error,
    /// And what may need one soon.
    Warn,
    /// And changes of state.
    #[default]
    Info,
    /// And what a developer asks for.
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

/// Which requests get an access line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessLines {
    /// Every request.
    All,
    /// Requests that a limit rejected.
    #[default]
    Rejected,
    /// None.
    Off,
}
