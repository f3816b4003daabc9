//! The background tasks of a configuration: fetch key sets, watch certificates, check the health of
//! servers. The next configuration starts its own tasks and takes over their results.

use std::{future::Future, pin::Pin, sync::Arc};

use tokio::task::JoinHandle;

use super::certificates::Certificates;
use crate::{gateway::ActiveConfig, issuer::Issuer};

pub(super) type BackgroundTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The background tasks of one configuration. Needs the control thread's runtime. A failed task
/// logs the failure and retries, so none can stop the gateway.
pub(super) async fn of(
    active: &Arc<ActiveConfig>,
    previous: Option<&ActiveConfig>,
    certificates: Certificates,
) -> Vec<BackgroundTask> {
    let mut tasks: Vec<BackgroundTask> = vec![
        Box::pin(Arc::clone(active).run_health_checks()),
        Box::pin(certificates.watch()),
    ];
    for issuer in issuers(active, previous).await {
        tasks.push(Box::pin(issuer.keep_fresh()));
    }
    tasks
}

/// Fetches every published key set once, in parallel, so keys are there for the first tokens. Takes
/// over the sets that the previous configuration fetched. Bounded by the timeout of one fetch.
async fn issuers(active: &ActiveConfig, previous: Option<&ActiveConfig>) -> Vec<Issuer> {
    let mut issuers = Vec::new();
    let mut fetches = Vec::new();
    for (url, keys) in active.published_keys() {
        let mut issuer = Issuer::new(url, keys, active.process().metrics());
        let mut before = previous.into_iter().flat_map(ActiveConfig::published_keys);
        match before.find(|(known, _)| *known == url) {
            Some((_, known)) => {
                keys.continue_from(known);
                issuers.push(issuer);
            }
            None => fetches.push(tokio::spawn(async move {
                issuer.fetch().await;
                issuer
            })),
        }
    }
    for fetch in fetches {
        issuers.extend(fetch.await.ok());
    }
    issuers
}

/// The running background tasks.
#[derive(Debug, Default)]
pub(super) struct TaskSet(Vec<JoinHandle<()>>);

impl TaskSet {
    /// Aborts the current tasks and starts these.
    pub(super) fn replace(&mut self, tasks: Vec<BackgroundTask>) {
        self.0.iter().for_each(JoinHandle::abort);
        self.0 = tasks.into_iter().map(tokio::spawn).collect();
    }
}
