//! Compiles the configuration text into one immutable, checked [`Snapshot`], or into a report of
//! every problem.
//!
//! [`load()`] takes a file and [`compile()`] a text. On the way:
//!
//! ```text
//! source ─▶ document ─▶ section, value ─▶ compile ─▶ snapshot
//! text      TOML with   each key checked  one file   settings of
//!           positions   with its record   a table    the modules below
//!                       in `keys`
//! ```
//!
//! A step that finds a problem reports it to `diagnostic` and continues with a default. Nothing
//! outside this folder sees the file as written. `keys` is the only list of keys.

mod changes;
mod code;
mod compile;
mod cost;
mod date;
mod diagnostic;
mod document;
mod environment;
mod expanded_text;
mod keys;
mod limit;
mod load;
mod quick;
mod read;
mod renamed;
mod schema;
mod section;
mod snapshot;
mod source;
mod stamps;
mod units;
mod value;
mod written;

pub use changes::{Changes, NamedChanges};
pub use code::Code;
pub use cost::{CostPreset, CostSettings, CostSource, ModelSource};
pub use date::parse_moment;
pub(crate) use diagnostic::count;
pub use diagnostic::{Diagnostic, DiagnosticReport, MAX_SHOWN, Severity};
pub use limit::{
    ConfigOverride, Effect, Exempt, LimitSettings, Mode, Over, OverrideTarget, Share,
    SharedSettings, Slow,
};
pub use load::{LoadedConfig, compile, load, unfit};
pub use quick::{parse_limit, parse_to, quick};
pub use read::read_file;
pub use schema::json_schema;
pub use snapshot::{AdminSettings, ProcessSettings, RouteSettings, Snapshot};
pub use source::{MAX_LINE_BYTES, SourceLocation};
pub use stamps::{Stamps, fingerprint};
pub use units::parse_span;
pub use written::WrittenConfig;
