// systemd's side of the notification socket. Not a test file.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { eventually } from './server.mjs';

// Node has no datagram sockets of the file system; python3, which the build needs anyway, has. Anybody may write: the server may run as
// another user.
const listener = `
import json, os, socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
print("bound", flush=True)
while True:
    for line in s.recv(65536).decode().split("\\n"):
        print(json.dumps({"at": time.time(), "line": line}), flush=True)
`;

// heard: every line of every datagram with its time, in order.
export class NotifySocket {
  static async listen(path) {
    const n = new NotifySocket();
    n.path = path;
    n.heard = [];
    n.child = spawn('python3', ['-c', listener, path], { stdio: ['ignore', 'pipe', 'inherit'] });
    n.exited = once(n.child, 'exit');
    let text = '', bound = false;
    n.child.stdout.on('data', (d) => {
      text += d;
      const lines = text.split('\n');
      text = lines.pop();
      for (const line of lines) line === 'bound' ? bound = true : n.heard.push(JSON.parse(line));
    });
    await eventually('the notification socket is bound', () => bound);
    return n;
  }

  get lines() { return this.heard.map((h) => h.line); }
  said(line) { return this.heard.some((h) => h.line === line); }

  async close() {
    this.child.kill('SIGKILL');
    await this.exited;
  }
}
