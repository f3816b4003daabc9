//! Tracks which gateways are alive, which servers lost counters, and on which limits gateways
//! disagree.

use std::rc::Rc;

use redis::Value;

use super::{Event, EventKind, GONE_MS, RedisClients};
use crate::budget::{loss::Loss, redis::ScriptCall, settings::SharedLimit};

impl RedisClients {
    /// Sends a heartbeat or a goodbye, and learns the number of gateways. It goes to the server
    /// that counts them and to every other server with keys, so that an emptied server is detected.
    pub(in crate::budget::lease_manager) fn count(
        &self,
        goes: bool,
    ) -> tokio::task::JoinHandle<()> {
        let key = format!("{}:gateways", self.prefix);
        let counting = self.servers.shard_of(&key);
        if !goes {
            let others = (0..self.shards.len())
                .filter(|&shard| shard != counting && self.servers.is_used(shard));
            for shard in others.filter(|&shard| !self.is_open(shard)) {
                let probe = self.servers.probe_key(&self.prefix, shard);
                self.note(shard, format!("{probe}:gateways"), false, false);
            }
        }
        self.note(counting, key, goes, true)
    }

    fn note(
        &self,
        shard: usize,
        key: String,
        goes: bool,
        counts: bool,
    ) -> tokio::task::JoinHandle<()> {
        let goes = u8::from(goes).to_string();
        let arguments = [self.id.clone(), GONE_MS.to_string(), goes].map(String::into_bytes);
        let (servers, scripts) = (Rc::clone(&self.servers), Rc::clone(&self.scripts));
        let events = self.events.clone();
        tokio::task::spawn_local(async move {
            let call = ScriptCall::new(&key, &arguments);
            // on failure the last number remains
            if let Ok(Value::Array(answer)) = servers.call(&scripts.nodes, call).await
                && let [Value::Int(gateways), Value::Int(new)] = answer[..]
            {
                let gateways = if counts { gateways } else { 0 };
                let kind = EventKind::Counted {
                    gateways: u64::try_from(gateways).unwrap_or(0),
                    is_new: new == 1,
                };
                let _ = events.send(Event::about(shard, kind)).await;
            }
        })
    }

    /// A server recorded this gateway's heartbeat; `gateways` is 0 if it does not count them.
    pub(in crate::budget::lease_manager) fn counted(
        &mut self,
        now_ns: u64,
        shard: usize,
        gateways: u64,
        is_new: bool,
    ) {
        if gateways > 0 {
            let count = gateways as f64;
            if is_new && count < self.gateways {
                // an emptied server counts from one; the other gateways send heartbeats soon
                self.at_least = (self.gateways, now_ns.saturating_add(GONE_MS * 1_000_000));
            }
            let (least, until_ns) = self.at_least;
            self.gateways = if now_ns < until_ns {
                count.max(least)
            } else {
                count
            };
            self.metrics.gateways.set(self.gateways);
        }
        self.meet_servers();
        self.look_at_run(shard);
        let before_ns = self.shards[shard].noted_ns.replace(now_ns);
        // a gateway that was silent for long was forgotten rightly
        let is_recent =
            before_ns.is_some_and(|before| now_ns.saturating_sub(before) < GONE_MS / 2 * 1_000_000);
        if is_new && is_recent && !self.shards[shard].has_lost {
            self.lost(shard, Loss::Emptied);
        }
    }

    /// Records which run of a server answers: call it after each answer.
    pub(in crate::budget::lease_manager) fn look_at_run(&mut self, shard: usize) {
        let run = self.servers.link(shard).run();
        let before = self.shards[shard].run;
        if run == before || run == 0 {
            return;
        }
        self.shards[shard].run = run;
        if before != 0 {
            self.shards[shard].noted_ns = None;
            self.lost(shard, Loss::Restarted);
        }
    }

    fn lost(&mut self, shard: usize, loss: Loss) {
        self.shards[shard].has_lost = true;
        self.metrics.lost(loss.label());
        if let Some(suppressed) = self.server_lost.speak() {
            tracing::warn!(
                redis = self.servers.link(shard).address(),
                kind = loss.label(),
                suppressed,
                "Redis may have lost counters: gateways restore them from memory"
            );
        }
    }

    /// Returns a server that has lost data, and clears the mark.
    pub(in crate::budget::lease_manager) fn take_loss(&mut self) -> Option<usize> {
        let shard = self.shards.iter().position(|shard| shard.has_lost)?;
        self.shards[shard].has_lost = false;
        Some(shard)
    }

    /// The state of one key was missing or older than known.
    pub(in crate::budget::lease_manager) fn lost_key(&self, shard: usize) {
        self.metrics.lost(Loss::Key.label());
        if let Some(suppressed) = self.key_lost.speak() {
            tracing::warn!(
                redis = self.servers.link(shard).address(),
                kind = Loss::Key.label(),
                suppressed,
                "Redis lost the counter of a key: gateways restore it from memory"
            );
        }
    }

    /// Gateways disagree on a limit, and have for a while.
    pub(in crate::budget::lease_manager) fn disagree(&self, limit: &SharedLimit) {
        limit.metrics.disagreement.set(1.0);
        tracing::warn!(
            limit = limit.name,
            "gateways have different settings for this shared limit: each enforces its own quota and \
             counts all admitted requests; give all gateways the same configuration"
        );
    }
}
