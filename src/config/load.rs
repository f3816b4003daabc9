//! Reads a configuration file, or takes its text, and compiles it.

use std::path::Path;

use super::{
    code::Code,
    diagnostic::{self, DiagnosticReport, Problems, Severity},
    document::Document,
    read,
    snapshot::Snapshot,
    source::SourceText,
};

/// The largest configuration file.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// A usable configuration, with its warnings.
#[derive(Debug)]
pub struct LoadedConfig {
    /// The compiled configuration.
    pub snapshot: Snapshot,
    /// Warnings only.
    pub warnings: DiagnosticReport,
}

/// Reads and compiles a file. Its relative paths start at its folder. Blocks on disk reads.
pub fn load(path: &Path) -> Result<LoadedConfig, DiagnosticReport> {
    let name = path.display().to_string();
    let bytes = read::bytes(path, MAX_FILE_BYTES).map_err(|error| {
        let message = format!("{} cannot be read: {error}", diagnostic::quote(&name));
        DiagnosticReport::of_file(
            Code::Unreadable,
            &name,
            message,
            "name the file with --config; `tidegate init` prints one to start from",
        )
    })?;
    let text = String::from_utf8(bytes).map_err(|error| not_utf8(&name, &error))?;
    let base_dir = path.parent().unwrap_or(Path::new(""));
    compile(&name, &text, base_dir, &|variable| {
        std::env::var(variable).ok()
    })
}

fn not_utf8(name: &str, error: &std::string::FromUtf8Error) -> DiagnosticReport {
    let at = error.utf8_error().valid_up_to();
    let source = SourceText::new(name, String::from_utf8_lossy(error.as_bytes()).into_owned());
    let problem = diagnostic::PendingDiagnostic::new(Code::NotUtf8, "this is not UTF-8")
        .hint("save the file as UTF-8");
    let problems = Problems::default();
    // lossy conversion keeps everything before the first bad byte, so the position is right
    problems.at(
        &source,
        at..at + '\u{fffd}'.len_utf8(),
        Severity::Error,
        problem,
    );
    problems.into_report()
}

/// Compiles a text. `source_name` names it in diagnostics, its relative paths start at `base_dir`,
/// and `env` resolves `${NAME}`. Reads the files that the text names. Fails with every problem
/// found.
pub fn compile(
    source_name: &str,
    text: &str,
    base_dir: &Path,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<LoadedConfig, DiagnosticReport> {
    let source = SourceText::new(source_name, text.to_owned());
    let problems = Problems::default();
    let files = read::ConfigFiles::default();
    let document = Document {
        source: &source,
        problems: &problems,
        files: &files,
        env,
    };
    let tables = document.parse(source.text());
    let snapshot = tables.and_then(|tables| super::compile::snapshot(document, base_dir, &tables));
    let report = problems.into_report();
    match snapshot {
        Some(snapshot) if report.errors() == 0 => Ok(LoadedConfig {
            snapshot,
            warnings: report,
        }),
        _ => Err(report),
    }
}

/// The report for a valid configuration that this process cannot apply.
pub fn unfit(file: &str, why: String) -> DiagnosticReport {
    let hint = "the previous configuration is still active; fix the cause and reload again";
    DiagnosticReport::of_file(Code::Unfit, file, why, hint)
}
