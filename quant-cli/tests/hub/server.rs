//! A hub on this machine: the part of the protocol that a download needs, with faults on demand.
//!
//! Large files (weights, compressed texts) are served as the real hub serves them: the response carries their SHA-256
//! as the tag and redirects to another address, which serves the bytes under another tag. Small files are served
//! directly, under their git hash.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quant_tests::files::{sha256, snapshot};
use serde_json::{Value, json};
use sha1::{Digest, Sha1};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// The connection breaks in the middle, this many times.
    Break(u32),
    /// One byte is wrong.
    Bend,
    /// Half of the bytes arrive, then nothing.
    Stall,
    /// The server refuses to send the bytes, although it announced the file.
    Refuse,
}

#[derive(Debug, Clone, Default)]
pub struct Repository {
    commit: String,
    files: BTreeMap<String, Vec<u8>>,
    /// A branch or tag in addition to `main`.
    pub tag: Option<String>,
    /// The token that requests must carry.
    pub token: Option<String>,
    /// Whether the listing gives SHA-256 hashes as `oid`, like the real hub, not as `sha256`, which hf-hub reads.
    pub silent: bool,
}

impl Repository {
    pub fn new(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        let mut repository = Self { files: files.into_iter().collect(), ..Self::default() };
        repository.seal();
        repository
    }

    pub fn of(directory: &Path) -> Self {
        Self::new(snapshot(directory).into_iter().filter_map(|(name, bytes)| Some((name, bytes?))))
    }

    pub fn put(&mut self, name: &str, bytes: impl Into<Vec<u8>>) {
        self.files.insert(name.to_owned(), bytes.into());
        self.seal();
    }

    pub fn take(&mut self, name: &str) -> Vec<u8> {
        let bytes = self.files.remove(name).expect("a file");
        self.seal();
        bytes
    }

    fn seal(&mut self) {
        let all: Vec<u8> = self.files.iter().flat_map(|(n, b)| [n.as_bytes(), b].concat()).collect();
        self.commit = git_hash(&all);
    }
}

/// The running server; it ends when dropped.
pub struct Hub {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    repositories: Mutex<BTreeMap<String, Repository>>,
    faults: Mutex<BTreeMap<String, Fault>>,
    log: Mutex<Vec<String>>,
    ended: AtomicBool,
}

impl Hub {
    /// Starts the server with these repositories, `models/org/name` or `datasets/org/name`.
    pub fn start<const N: usize>(repositories: [(&str, Repository); N]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State::default());
        for (name, repository) in repositories {
            state.repositories.lock().unwrap().insert(name.to_owned(), repository);
        }
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.ended.load(Ordering::SeqCst) {
                    return;
                }
                let state = shared.clone();
                // A client that disconnects midway is not a fault of the server.
                std::thread::spawn(move || stream.and_then(|s| serve(&s, address, &state)));
            }
        });
        Self { address, state }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn change(&self, repository: &str, change: impl FnOnce(&mut Repository)) {
        change(self.state.repositories.lock().unwrap().get_mut(repository).expect("a repository"));
    }

    /// Makes the server apply this fault to a file from now on, or none.
    pub fn set_fault(&self, file: &str, fault: Option<Fault>) {
        let mut faults = self.state.faults.lock().unwrap();
        match fault {
            Some(fault) => faults.insert(file.to_owned(), fault),
            None => faults.remove(file),
        };
    }

    /// The requests so far, such as `GET /org/name/resolve/…`; clears the list.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.log.lock().unwrap())
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        // Wakes the listener, which then closes the port.
        let _ = TcpStream::connect(self.address);
        while TcpStream::connect(self.address).is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn git_hash(bytes: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", bytes.len()));
    hash.update(bytes);
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

fn is_large(name: &str) -> bool {
    [".safetensors", ".zst", ".gz", ".parquet"].iter().any(|e| name.ends_with(e))
}

struct Answer {
    status: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    fault: Option<Fault>,
}

impl Answer {
    fn new(status: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into(), fault: None }
    }

    fn error(status: &'static str, code: &str, message: &str) -> Self {
        let mut answer = Self::new(status, json!({ "error": message }).to_string());
        answer.headers = vec![("X-Error-Code", code.to_owned()), ("X-Error-Message", message.to_owned())];
        answer
    }
}

fn serve(stream: &TcpStream, address: SocketAddr, state: &State) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (Some(method), Some(target)) = (words.next(), words.next()) else { return Ok(()) };
    let (mut token, mut length) = (None, 0);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let Some((name, value)) = header.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => token = value.strip_prefix("Bearer ").map(str::to_owned),
            "content-length" => length = value.parse().unwrap_or(0),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    state.log.lock().unwrap().push(format!("{method} {target}"));
    let path = target.split('?').next().unwrap_or_default().trim_start_matches('/').to_owned();
    let answer = answer(&method, &path, token.as_deref(), &body, address, state);
    send(stream, &method, &answer, state)
}

fn send(mut stream: &TcpStream, method: &str, answer: &Answer, state: &State) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {}\r\nConnection: close\r\n", answer.status);
    head += &format!("Content-Length: {}\r\n", answer.body.len());
    for (name, value) in &answer.headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    if method == "HEAD" {
        return Ok(());
    }
    let half = &answer.body[..answer.body.len() / 2];
    match answer.fault {
        Some(Fault::Break(_)) => stream.write_all(half),
        Some(Fault::Stall) => {
            stream.write_all(half)?;
            while !state.ended.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(())
        }
        _ => stream.write_all(&answer.body),
    }
}

fn answer(
    method: &str,
    path: &str,
    token: Option<&str>,
    body: &[u8],
    address: SocketAddr,
    state: &State,
) -> Answer {
    let repositories = state.repositories.lock().unwrap();
    if let Some(sha) = path.strip_prefix("cdn/") {
        let all = repositories.values().flat_map(|r| &r.files);
        return match all.clone().find(|(_, bytes)| sha256(bytes) == sha) {
            Some((name, bytes)) => content(name, bytes, state),
            None => Answer::new("404 Not Found", ""),
        };
    }
    let parts: Vec<&str> = path.split('/').collect();
    let (kind, rest, is_api) = match &parts[..] {
        ["api", kind @ ("models" | "datasets"), rest @ ..] => (*kind, rest, true),
        ["datasets", rest @ ..] => ("datasets", rest, false),
        rest => ("models", rest, false),
    };
    let [owner, name, action, revision, file @ ..] = rest else { return Answer::new("400 Bad Request", "") };
    let Some(repository) = repositories.get(&format!("{kind}/{owner}/{name}")) else {
        return Answer::error("404 Not Found", "RepoNotFound", "Repository not found");
    };
    if repository.token.as_deref().is_some_and(|t| Some(t) != token) {
        return Answer::error("401 Unauthorized", "GatedRepo", "Access to this repository is restricted.");
    }
    let known = [Some(repository.commit.as_str()), Some("main"), repository.tag.as_deref()];
    if !known.contains(&Some(*revision)) {
        return Answer::error("404 Not Found", "RevisionNotFound", "Invalid rev id");
    }
    match (is_api, *action, method) {
        (true, "revision", "GET") => {
            let info = json!({ "id": format!("{owner}/{name}"), "sha": repository.commit });
            Answer::new("200 OK", info.to_string())
        }
        (true, "tree", "GET") => Answer::new("200 OK", entries(repository, |_| true).to_string()),
        (true, "paths-info", "POST") => {
            let asked: Value = serde_json::from_slice(body).unwrap_or_default();
            let wanted = |name: &str| asked["paths"].as_array().is_some_and(|p| p.contains(&json!(name)));
            Answer::new("200 OK", entries(repository, wanted).to_string())
        }
        (false, "resolve", "GET" | "HEAD") => {
            let file = file.join("/");
            match repository.files.get(&file) {
                Some(bytes) => resolve(&file, bytes, &repository.commit, address, state),
                None => Answer::error("404 Not Found", "EntryNotFound", "Entry not found"),
            }
        }
        _ => Answer::new("400 Bad Request", ""),
    }
}

/// Lists files as the real hub does, which calls the SHA-256 of a large file `oid`.
fn entries(repository: &Repository, wanted: impl Fn(&str) -> bool) -> Value {
    let files = repository.files.iter().filter(|(name, _)| wanted(name));
    let list = files.map(|(name, bytes)| {
        let mut entry = json!({ "type": "file", "oid": git_hash(bytes), "size": bytes.len(), "path": name });
        if is_large(name) {
            entry["oid"] = json!(git_hash(b"a pointer"));
            let key = if repository.silent { "oid" } else { "sha256" };
            entry["lfs"] = json!({ "size": bytes.len(), "pointerSize": 134, key: sha256(bytes) });
        }
        entry
    });
    list.chain([json!({ "type": "directory", "oid": git_hash(b""), "size": 0, "path": "onnx" })]).collect()
}

fn resolve(name: &str, bytes: &[u8], commit: &str, address: SocketAddr, state: &State) -> Answer {
    let mut answer = match is_large(name) {
        true => {
            let sha = sha256(bytes);
            let mut answer = Answer::new("302 Found", "");
            answer.headers = vec![
                ("X-Linked-Etag", format!("\"{sha}\"")),
                ("X-Linked-Size", bytes.len().to_string()),
                ("Location", format!("http://{address}/cdn/{sha}")),
            ];
            answer
        }
        false => {
            let mut answer = content(name, bytes, state);
            answer.headers = vec![("ETag", format!("\"{}\"", git_hash(bytes)))];
            answer
        }
    };
    answer.headers.push(("X-Repo-Commit", commit.to_owned()));
    answer
}

fn content(name: &str, bytes: &[u8], state: &State) -> Answer {
    let mut faults = state.faults.lock().unwrap();
    let fault = faults.get(name).copied();
    let mut answer = Answer::new("200 OK", bytes);
    answer.headers = vec![("ETag", "\"0123456789abcdef0123456789abcdef\"".to_owned())];
    answer.fault = fault;
    match fault {
        Some(Fault::Break(0)) => answer.fault = None,
        Some(Fault::Break(times)) => {
            faults.insert(name.to_owned(), Fault::Break(times - 1));
        }
        Some(Fault::Bend) => {
            let middle = bytes.len() / 2;
            answer.body[middle] ^= 1;
        }
        Some(Fault::Refuse) => return Answer::new("403 Forbidden", "the link has expired"),
        _ => {}
    }
    answer
}
