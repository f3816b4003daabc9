//! Which gateways are alive, which servers have lost what was counted, and who differs about a limit.

use std::rc::Rc;

use redis::Value;

use super::{Event, EventKind, GONE_MS, Wire};
use crate::budget::{redis::ScriptCall, settings::SharedLimit};

/// How data of Redis was lost, as a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::budget) enum Loss {
    /// Another run of a server answers, or another server: what it has may be old, or nothing.
    Restarted,
    /// A server has forgotten that this gateway lives: it was emptied.
    Emptied,
    /// The state of one key was gone, or was an older one.
    Key,
}

impl Loss {
    pub(in crate::budget) const LABELS: [&str; 3] = ["restarted", "emptied", "key"];

    fn label(self) -> &'static str {
        match self {
            Loss::Restarted => "restarted",
            Loss::Emptied => "emptied",
            Loss::Key => "key",
        }
    }
}

impl Wire {
    /// Says that this gateway lives, or that it goes, and learns how many do: at the server that counts them, and at every
    /// other that keeps keys, so that one which was emptied is found out.
    pub(in crate::budget::keeper) fn count(&self, goes: bool) -> tokio::task::JoinHandle<()> {
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
            // where it fails, the last number holds
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

    /// A server has noted that this gateway lives; `gateways` is 0 where it does not count them.
    pub(in crate::budget::keeper) fn counted(
        &mut self,
        now_ns: u64,
        shard: usize,
        gateways: u64,
        is_new: bool,
    ) {
        if gateways > 0 {
            let count = gateways as f64;
            if is_new && count < self.gateways {
                // a server that was emptied counts from one on: the others say soon that they live
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
        // one that was silent for long was forgotten by rights
        let is_recent =
            before_ns.is_some_and(|before| now_ns.saturating_sub(before) < GONE_MS / 2 * 1_000_000);
        if is_new && is_recent && !self.shards[shard].has_lost {
            self.lost(shard, Loss::Emptied);
        }
    }

    /// Notes which run of a server answers.
    pub(super) fn look_at_run(&mut self, shard: usize) {
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
                "Redis may have lost what was counted: gateways tell it what they remember"
            );
        }
    }

    /// A server that has lost something since this was last asked.
    pub(in crate::budget::keeper) fn take_loss(&mut self) -> Option<usize> {
        let shard = self.shards.iter().position(|shard| shard.has_lost)?;
        self.shards[shard].has_lost = false;
        Some(shard)
    }

    /// The state of one key was gone, or was an older one.
    pub(in crate::budget::keeper) fn lost_key(&self, shard: usize) {
        self.metrics.lost(Loss::Key.label());
        if let Some(suppressed) = self.key_lost.speak() {
            tracing::warn!(
                redis = self.servers.link(shard).address(),
                kind = Loss::Key.label(),
                suppressed,
                "Redis has lost what was counted of a key: it goes on from what gateways remember"
            );
        }
    }

    /// Gateways differ about a limit, and have for a while.
    pub(in crate::budget::keeper) fn disagree(&self, limit: &SharedLimit) {
        limit.metrics.disagreement.set(1.0);
        tracing::warn!(
            limit = limit.name,
            "gateways share this limit and count it differently: each keeps its own quota and charges what all admit; \
             give all gateways the same configuration"
        );
    }
}
