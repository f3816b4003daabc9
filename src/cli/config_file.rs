//! Which configuration file a command reads.

use std::path::PathBuf;

use clap::Args;

/// The choice of the configuration file.
#[derive(Clone, Debug, Args)]
pub struct ConfigFile {
    /// The configuration file [env: TIDEGATE_CONFIG] [default: gateway.toml]
    #[arg(value_name = "FILE", conflicts_with = "config")]
    pub(super) file: Option<PathBuf>,
    /// The same, as an option
    #[arg(short, long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
}

impl ConfigFile {
    /// The path from the command line, else from `TIDEGATE_CONFIG`, else `gateway.toml`.
    /// clap does not read the variable: a set variable would then conflict with the options
    /// that need no file.
    pub fn path(&self) -> PathBuf {
        let named = self.file.as_ref().or(self.config.as_ref()).cloned();
        let of_environment = || {
            let path = std::env::var_os("TIDEGATE_CONFIG")?;
            (!path.is_empty()).then(|| path.into())
        };
        named
            .or_else(of_environment)
            .unwrap_or_else(|| "gateway.toml".into())
    }
}
