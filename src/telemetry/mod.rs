//! What the gateway lets an operator see: metrics, access lines, log lines.

pub mod access;
pub mod handles;
pub mod json;
pub mod log;
pub mod metrics;
mod process;
pub mod queue;
mod time;

pub use self::{metrics::Metrics, time::date};

/// `[log]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogSettings {
    /// The least severe level that is written.
    pub level: LogLevel,
    /// Text or JSON.
    pub format: LogFormat,
    /// Which requests get an access line.
    pub access: AccessLines,
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
