//! What is done beside the requests for as long as a configuration runs: key sets are fetched, certificates watched, servers
//! checked. The next configuration brings its own, and takes over what is known already.

use std::{future::Future, pin::Pin, sync::Arc};

use tokio::task::JoinHandle;

use super::certificates::Certificates;
use crate::{gateway::Shared, issuer::Issuer};

pub(super) type Errand = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The errands of one configuration. Needs the control thread's runtime; what fails is said and tried again, so nothing here
/// keeps a gateway from running.
pub(super) async fn of(
    shared: &Arc<Shared>,
    previous: Option<&Shared>,
    certificates: Certificates,
) -> Vec<Errand> {
    let mut errands: Vec<Errand> = vec![
        Box::pin(Arc::clone(shared).keep_watch()),
        Box::pin(certificates.watch()),
    ];
    for issuer in issuers(shared, previous).await {
        errands.push(Box::pin(issuer.keep_fresh()));
    }
    errands
}

/// Tries once to fetch each published key set, all at the same time, so that the first tokens find keys; one that the
/// configuration before has fetched is passed on. Bounded by the time of one fetch.
async fn issuers(shared: &Shared, previous: Option<&Shared>) -> Vec<Issuer> {
    let mut issuers = Vec::new();
    let mut fetches = Vec::new();
    for (url, keys) in shared.published_keys() {
        let mut issuer = Issuer::new(url, keys, shared.process().metrics());
        let mut before = previous.into_iter().flat_map(Shared::published_keys);
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

/// Errands that are being done.
#[derive(Debug, Default)]
pub(super) struct UnderWay(Vec<JoinHandle<()>>);

impl UnderWay {
    /// Does these from now on, and no others.
    pub(super) fn replace(&mut self, errands: Vec<Errand>) {
        self.0.iter().for_each(JoinHandle::abort);
        self.0 = errands.into_iter().map(tokio::spawn).collect();
    }
}
