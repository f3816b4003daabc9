//! Reloads, one at a time: reads and checks the file again and activates it, or keeps the active
//! configuration.

use std::{path::PathBuf, sync::Arc};

use tokio::sync::mpsc;

use super::{activation::Activation, low_priority::run_at_low_priority, notify};
use crate::{
    admin::{Reload, Reloaded},
    config::{self, Changes, DiagnosticReport, LoadedConfig},
    gateway::ActiveConfigHandle,
    listener::BindMode,
};

/// Serves reload requests.
pub(super) struct Reloader {
    /// `None` if the gateway was started without a file.
    pub(super) file: Option<PathBuf>,
    pub(super) current: Arc<ActiveConfigHandle>,
    pub(super) activation: Activation,
}

impl Reloader {
    /// Serves until the process ends.
    pub(super) async fn serve(mut self, mut asked: mpsc::Receiver<Reload>) {
        while let Some(Reload { why, answer }) = asked.recv().await {
            notify::notify(notify::RELOADING);
            let result = self.reload(&why).await;
            notify::notify(notify::READY);
            if let Err(report) = &result {
                self.log_refusal(&why, report);
            }
            // the caller may be gone
            let _ = answer.send(result);
        }
    }

    async fn reload(&mut self, why: &str) -> Result<Reloaded, DiagnosticReport> {
        let Some(file) = self.file.clone() else {
            return Err(config::unfit(
                "command line",
                "this gateway was started without a file: there is nothing to reload".to_owned(),
            ));
        };
        let shown = file.display().to_string();
        let unfit = |error: &dyn std::fmt::Display| config::unfit(&shown, error.to_string());
        let running = Arc::clone(self.current.active().snapshot());
        let loaded = run_at_low_priority(move || {
            let loaded = config::load(&file)?;
            let changes = Changes::between(&running, &loaded.snapshot);
            Ok((loaded, changes))
        });
        let (loaded, changes) = loaded.await.map_err(|error| unfit(&error))??;
        let LoadedConfig { snapshot, warnings } = loaded;
        let listeners = self.activation.bind(&snapshot.listeners, BindMode::Alone);
        let listeners = listeners.map_err(|error| unfit(&error))?;
        let prepared = self.activation.prepare(snapshot, listeners).await;
        let active = self
            .activation
            .activate(prepared.map_err(|error| unfit(&error))?)
            .await;
        self.current.replace(Arc::clone(&active));
        let hash = &active.snapshot().hash;
        tracing::info!(
            why,
            hash,
            warnings = warnings.warnings(),
            "configuration reloaded: {changes}"
        );
        Ok(Reloaded {
            hash: hash.clone(),
            changes,
            warnings,
        })
    }

    fn log_refusal(&self, why: &str, report: &DiagnosticReport) {
        self.current.active().process().metrics().config_refused();
        for problem in &report.diagnostics {
            let (line, column) = problem
                .place
                .as_ref()
                .map_or((0, 0), |place| (place.line, place.column));
            let (code, file, hint) = (problem.code.as_str(), &problem.file, &problem.hint);
            match problem.severity {
                config::Severity::Error => {
                    tracing::error!(code, file, line, column, hint, "{}", problem.message)
                }
                config::Severity::Warning => {
                    tracing::warn!(code, file, line, column, hint, "{}", problem.message)
                }
            }
        }
        tracing::error!(
            why,
            "configuration NOT reloaded: {}; the previous configuration is still active",
            report.summary()
        );
    }
}
