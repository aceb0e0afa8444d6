//! Requests to an object store.
//!
//! Requests run on a thread of their own, so that the calling thread can give up when the job is cancelled, and so that
//! transfers go on while it computes hashes. `object_store` repeats failed requests for half a minute.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use object_store::path::Path as Key;
use object_store::{Error as StoreError, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use tokio::runtime::{Builder, Runtime};
use tokio::task::AbortHandle;

use super::fault;
use crate::{CancelToken, Error, Result};

/// How often a waiting thread checks whether the job is cancelled.
const TICK: Duration = Duration::from_millis(100);
/// How long writes whose answer was lost are repeated.
const CREATE_TIME: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub(super) struct Client {
    store: Arc<dyn ObjectStore>,
    /// Present until the client is dropped.
    runtime: Option<Runtime>,
    /// The URL of the job, for messages.
    url: String,
}

/// An object, as far as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Contents {
    Absent,
    /// It has more bytes than were accepted.
    TooLong,
    Bytes(Vec<u8>),
}

/// A request that runs. Dropping it ends it.
pub(super) struct Pending<T> {
    receiver: Receiver<object_store::Result<T>>,
    task: AbortHandle,
}

impl Client {
    pub(super) fn new(store: Arc<dyn ObjectStore>, url: String) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("object-store")
            .enable_all()
            .build()
            .map_err(|e| Error::io("start a thread for", std::path::Path::new(&url), e))?;
        Ok(Self { store, runtime: Some(runtime), url })
    }

    /// Starts a request.
    fn start<T: Send + 'static, W>(
        &self,
        request: impl FnOnce(Arc<dyn ObjectStore>) -> W,
    ) -> Result<Pending<T>>
    where
        W: Future<Output = object_store::Result<T>> + Send + 'static,
    {
        let runtime = self.runtime.as_ref().ok_or_else(|| Error::Internal("the store is closed".into()))?;
        let (sender, receiver) = channel();
        let work = request(self.store.clone());
        let task = runtime.spawn(async move {
            // The caller may have given up.
            let _ = sender.send(work.await);
        });
        Ok(Pending { receiver, task: task.abort_handle() })
    }

    /// Waits for a request. `action` says what it does, as in `read X`.
    pub(super) fn wait<T>(&self, pending: Pending<T>, action: &str, cancel: &CancelToken) -> Result<T> {
        pending.wait(cancel)?.map_err(|e| fault::explained(&self.url, action, &e))
    }

    /// Reads an object of at most `max_bytes`.
    pub(super) fn get(&self, key: &Key, max_bytes: u64) -> Result<Pending<Contents>> {
        let key = key.clone();
        self.start(|store| async move { read(&*store, &key, max_bytes).await })
    }

    /// Writes an object if none has its name; returns whether it did.
    pub(super) fn create(&self, key: &Key, bytes: Vec<u8>) -> Result<Pending<bool>> {
        let (key, payload) = (key.clone(), PutPayload::from(bytes));
        self.start(|store| async move { create(&*store, &key, payload).await })
    }

    /// Writes an object, whatever has its name.
    pub(super) fn put(&self, key: &Key, bytes: Vec<u8>) -> Result<Pending<()>> {
        let (key, payload) = (key.clone(), PutPayload::from(bytes));
        self.start(|store| async move { store.put(&key, payload).await.map(drop) })
    }

    pub(super) fn exists(&self, key: &Key) -> Result<Pending<bool>> {
        let key = key.clone();
        self.start(|store| async move {
            match store.head(&key).await {
                Ok(_) => Ok(true),
                Err(e) if fault::is_absent(&e) => Ok(false),
                Err(e) => Err(e),
            }
        })
    }

    /// Renames an object; returns whether it existed.
    pub(super) fn rename(&self, from: &Key, to: &Key) -> Result<Pending<bool>> {
        let (from, to) = (from.clone(), to.clone());
        self.start(|store| async move {
            match store.copy(&from, &to).await {
                Ok(()) => {}
                Err(e) if fault::is_absent(&e) => return Ok(false),
                Err(e) => return Err(e),
            }
            remove(&*store, &from).await.map(|()| true)
        })
    }

    pub(super) fn remove(&self, key: &Key) -> Result<Pending<()>> {
        let key = key.clone();
        self.start(|store| async move { remove(&*store, &key).await })
    }

    /// Returns the objects and the folders directly under a prefix.
    pub(super) fn list(&self, prefix: &Key) -> Result<Pending<Vec<Key>>> {
        let prefix = prefix.clone();
        self.start(|store| async move {
            let found = store.list_with_delimiter(Some(&prefix)).await?;
            let objects = found.objects.into_iter().map(|object| object.location);
            Ok(objects.chain(found.common_prefixes).collect())
        })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Waiting for the thread could take as long as the resolution of a host name.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl<T> Pending<T> {
    fn wait(&self, cancel: &CancelToken) -> Result<object_store::Result<T>> {
        loop {
            cancel.check()?;
            match self.receiver.recv_timeout(TICK) {
                Ok(outcome) => return Ok(outcome),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Internal(
                        "a request to the object store ended without a result".into(),
                    ));
                }
            }
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn read(store: &dyn ObjectStore, key: &Key, max_bytes: u64) -> object_store::Result<Contents> {
    let result = match store.get_opts(key, GetOptions::default()).await {
        Err(e) if fault::is_absent(&e) => return Ok(Contents::Absent),
        other => other?,
    };
    if result.meta.size > max_bytes {
        return Ok(Contents::TooLong);
    }
    let mut bytes = Vec::with_capacity(usize::try_from(result.meta.size).unwrap_or(0));
    let mut stream = result.into_stream();
    // The store may send more than it announced.
    while let Some(piece) = stream.try_next().await? {
        if (bytes.len() + piece.len()) as u64 > max_bytes {
            return Ok(Contents::TooLong);
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(Contents::Bytes(bytes))
}

async fn create(store: &dyn ObjectStore, key: &Key, payload: PutPayload) -> object_store::Result<bool> {
    let started = Instant::now();
    loop {
        match store.put_opts(key, payload.clone(), PutMode::Create.into()).await {
            Ok(_) => return Ok(true),
            Err(StoreError::AlreadyExists { .. }) => return Ok(false),
            // A lost answer leaves open whether the object was written. If it was, the next attempt finds it, and the
            // caller compares it.
            Err(StoreError::Generic { .. }) if started.elapsed() < CREATE_TIME => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(e) => return Err(e),
        }
    }
}

async fn remove(store: &dyn ObjectStore, key: &Key) -> object_store::Result<()> {
    match store.delete(key).await {
        Err(e) if fault::is_absent(&e) => Ok(()),
        other => other,
    }
}
