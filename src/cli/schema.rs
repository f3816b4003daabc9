//! `tidegate schema`: prints the JSON Schema of the configuration file, for editors.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use crate::config;

/// Prints the schema. Exits 1 if it cannot be written.
pub fn schema() -> ExitCode {
    match io::stdout().write_all(config::json_schema().as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(anstream::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}
