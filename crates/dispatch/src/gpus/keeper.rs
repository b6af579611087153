//! The thread that keeps the GPUs of a run, and how others talk to it.
//!
//! It ends once everything is given back; where the agent is away, a while after that was tried for the last time.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use gpupool_api::RequestBody;
use gpupool_api::lease::{AttachBody, Attached, IfTaken};
use gpupool_client::local::LocalAgent;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::board::{Board, Held};
use super::limits::{ANSWER_PATIENCE, GIVE_BACK_LATER};
use super::place::Place;
use super::{GpuError, GpuMemory, GpuNews, GpuWish, Granted};
use crate::plan::Place as WorkerPlace;
use crate::{NotAttached, WorkerId};

/// Keeps the GPUs of a run. Stopped or dropped it gives everything back; end the workers before. Where the agent is away that is
/// waited for five seconds, and then goes on in the background. A copy in a forked child gives nothing back.
#[derive(Debug)]
#[must_use = "dropping it gives everything back"]
pub struct GpuKeeper {
    /// Without anybody to order anything, the thread gives everything back and ends.
    orders: Option<UnboundedSender<Order>>,
    /// Ends when the thread has done what can be waited for. In a lock only so that it can be shared.
    done: Mutex<Receiver<()>>,
    made_by: u32,
}

/// What the thread is asked. Whoever asks waits for the answer, so there are no more of these than threads that ask.
#[derive(Debug)]
enum Order {
    Attach { place: usize, lease: u64, pid: u32, answer: SyncSender<Result<Option<Attached>, GpuError>> },
    Look { answer: SyncSender<Result<GpuMemory, GpuError>> },
}

impl GpuKeeper {
    /// Asks the agent for what is wished, and tells from then on what becomes of it. `tell` is called by the keeper's thread:
    /// it has to come back at once, and must not call the keeper.
    pub fn start(
        agent: LocalAgent,
        wish: GpuWish,
        tell: impl FnMut(GpuNews) + Send + 'static,
    ) -> Result<Self, GpuError> {
        let bodies = wish.bodies()?;
        let board = Board::new(bodies.len(), Box::new(tell));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (orders, ordered) = unbounded_channel();
        let (is_done, done) = sync_channel(0);
        let run = move || {
            let left = runtime.block_on(keep(&agent, bodies, board, ordered));
            drop(is_done);
            runtime.block_on(give_back_later(&agent, left));
            // Nothing is left to be done; a look-up of a name that hangs holds nobody up.
            runtime.shutdown_background();
        };
        thread::Builder::new().name("gpupool-gpus".into()).spawn(run)?;
        Ok(Self { orders: Some(orders), done: Mutex::new(done), made_by: std::process::id() })
    }

    /// Tells the agent that a process, a descendant of ours whose program does not run yet, belongs to the lease; its
    /// descendants then do, too. A lease can have any number of them.
    ///
    /// Says in which control group it is now, where the agent can make one: moved out of it, the process is known by its
    /// environment only. `None` where the agent cannot see processes of ours.
    pub fn attach(&self, granted: &Granted, pid: u32) -> Result<Option<Attached>, GpuError> {
        let &Granted { place, lease, .. } = granted;
        self.ask(|answer| Order::Attach { place, lease, pid, answer })
    }

    /// Where a worker works that is started on what was granted. The place does not keep the GPUs: whoever has the keeper does.
    pub fn place(self: &Arc<Self>, worker: WorkerId, granted: &Granted) -> WorkerPlace {
        let (keeper, granted) = (Arc::downgrade(self), granted.clone());
        WorkerPlace {
            gpu_ids: granted.gpu_ids(),
            environment: granted.env.clone(),
            attach: Some(Arc::new(move |pid| {
                let given_back = || NotAttached::PlaceGone("the GPUs are being given back".into());
                let attached = keeper.upgrade().ok_or_else(given_back)?.attach(&granted, pid);
                let attached = attached.map_err(|error| match error {
                    GpuError::NotHeld { .. } => NotAttached::PlaceGone(error.to_string()),
                    _ => NotAttached::NotNow(error.to_string()),
                })?;
                Ok(attached.is_some_and(|attached| attached.cgroup.is_some()))
            })),
            ..WorkerPlace::new(worker)
        }
    }

    /// GPU memory that processes use on the devices of all places, as the agent read it last; it reads every second, unless
    /// it was told otherwise.
    pub fn gpu_memory(&self) -> Result<GpuMemory, GpuError> {
        self.ask(|answer| Order::Look { answer })
    }

    /// Gives everything back, and waits until the agent has it.
    pub fn give_back(self) {}

    fn ask<T>(&self, order: impl FnOnce(SyncSender<Result<T, GpuError>>) -> Order) -> Result<T, GpuError> {
        let (answer, answered) = sync_channel(1);
        let orders = self.orders.as_ref().ok_or(GpuError::Stopped)?;
        orders.send(order(answer)).map_err(|_| GpuError::Stopped)?;
        answered.recv().unwrap_or(Err(GpuError::Stopped))
    }
}

impl Drop for GpuKeeper {
    fn drop(&mut self) {
        if self.made_by != std::process::id() {
            // A forked child has no such thread, and what it held is its parent's. Waking the copy of a channel could wait for
            // ever for a lock that was held at the fork.
            std::mem::forget(self.orders.take());
            return;
        }
        drop(self.orders.take());
        // Nothing is ever sent: it ends when the other end is gone.
        let _ = self.done.get_mut().unwrap_or_else(PoisonError::into_inner).recv();
    }
}

/// Keeps all places until nobody orders anything any more; then says which leases could not be given back.
async fn keep(
    agent: &LocalAgent,
    bodies: Vec<RequestBody>,
    board: Board,
    mut orders: UnboundedReceiver<Order>,
) -> Vec<u64> {
    let (stop, stopped) = watch::channel(false);
    let mut places = JoinSet::new();
    for (number, body) in bodies.into_iter().enumerate() {
        let place = Place { number, agent: agent.clone(), body, board: board.clone(), stop: stopped.clone() };
        places.spawn(place.keep());
    }
    let mut errands = JoinSet::new();
    while let Some(order) = orders.recv().await {
        while errands.try_join_next().is_some() {}
        errands.spawn(run(order, agent.clone(), board.clone()));
    }
    stop.send_replace(true);
    let mut left = Vec::new();
    while let Some(ended) = places.join_next().await {
        left.extend(ended.ok().flatten());
    }
    left
}

/// A process that lives on would keep what it did not give back.
async fn give_back_later(agent: &LocalAgent, leases: Vec<u64>) {
    let until = Instant::now() + GIVE_BACK_LATER;
    for lease in leases {
        let left = until.saturating_duration_since(Instant::now());
        // Where even this fails, it ends with the process.
        let _ = agent.client().release_within(lease, left).await;
    }
}

async fn run(order: Order, agent: LocalAgent, board: Board) {
    // Whoever asked may have gone.
    match order {
        Order::Attach { place, lease, pid, answer } => {
            let _ = answer.send(in_time(attach(&agent, &board, place, lease, pid)).await);
        }
        Order::Look { answer } => {
            let _ = answer.send(in_time(look(&agent, &board)).await);
        }
    }
}

async fn in_time<T>(answer: impl Future<Output = Result<T, GpuError>>) -> Result<T, GpuError> {
    tokio::time::timeout(ANSWER_PATIENCE, answer).await.unwrap_or(Err(GpuError::Silent))
}

async fn attach(
    agent: &LocalAgent,
    board: &Board,
    place: usize,
    lease: u64,
    pid: u32,
) -> Result<Option<Attached>, GpuError> {
    let held = board.held().into_iter().nth(place).flatten().filter(|held| held.granted.lease == lease);
    let held = held.ok_or(GpuError::NotHeld { lease })?;
    if !held.is_to_process {
        return Ok(None);
    }
    let body = AttachBody {
        token: held.granted.token,
        job_pid: Some(pid),
        if_taken: IfTaken::EndJobs,
        ..AttachBody::default()
    };
    match agent.client().attach(lease, &body).await {
        Err(error) if error.means_lost() => Err(GpuError::NotHeld { lease }),
        outcome => Ok(Some(outcome?)),
    }
}

async fn look(agent: &LocalAgent, board: &Board) -> Result<GpuMemory, GpuError> {
    let devices = agent.client().devices().await?;
    // One that was asked over its socket and cannot see our process has other numbers for processes.
    let sees_us = |held: &Held| held.is_to_process || !agent.knows_us();
    Ok(GpuMemory::new(&board.held(), &devices, sees_us))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_can_be_shared_by_threads() {
        fn is_shared<T: Send + Sync>() {}
        is_shared::<GpuKeeper>();
    }
}
