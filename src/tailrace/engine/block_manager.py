from collections import OrderedDict
import hashlib, struct
from tailrace.errors import EngineError, IntegrityError
class BlockManager:
    def __init__(s,num_blocks,block_size,*,prefix_cache=True):
        s.num_blocks=num_blocks; s.block_size=block_size; s.pc=prefix_cache
        s.free=list(range(num_blocks-1,-1,-1)); s.refs=[0]*num_blocks; s.hash={}; s.by={}; s.lru=OrderedDict()
        s.tables={}; s.chain={}
        s.hit_tokens_total=s.query_tokens_total=s.evictions_total=0
    @property
    def free_blocks(s): return len(s.free)+len(s.lru)
    @property
    def held_blocks(s): return s.num_blocks-s.free_blocks
    def _h(s,prev,ids): return hashlib.blake2b(prev+struct.pack(f"<{len(ids)}q",*ids),digest_size=16).digest()
    def _find(s,ids,salt):
        if not s.pc: return [],[]
        h=hashlib.blake2b(salt.encode(),digest_size=16).digest(); out=[];hs=[]
        for i in range((len(ids)-1)//s.block_size):
            h=s._h(h,ids[i*s.block_size:(i+1)*s.block_size])
            if h not in s.by: break
            out.append(s.by[h]);hs.append(h)
        return out,hs
    def lookup(s,ids,salt): return len(s._find(ids,salt)[0])*s.block_size
    def open(s,sid,ids,salt):
        if sid in s.tables: raise EngineError("dup")
        bl,hs=s._find(ids,salt)
        for b in bl:
            if s.refs[b]==0: del s.lru[b]
            s.refs[b]+=1
        s.tables[sid]=list(bl); s.chain[sid]=[len(hs),hs[-1] if hs else hashlib.blake2b(salt.encode(),digest_size=16).digest()]
        s.query_tokens_total+=len(ids); s.hit_tokens_total+=len(bl)*s.block_size
        return len(bl)*s.block_size
    def can_grow(s,sid,n): return -(-n//s.block_size)-len(s.tables[sid])<=s.free_blocks
    def grow(s,sid,n):
        t=s.tables[sid]
        while len(t)*s.block_size<n:
            if s.free: b=s.free.pop()
            else:
                b,_=s.lru.popitem(last=False); del s.by[s.hash.pop(b)]; s.evictions_total+=1
            s.refs[b]=1; t.append(b)
    def table(s,sid): return s.tables[sid]
    def commit(s,sid,ids,n):
        if not s.pc: return
        c=s.chain[sid]; t=s.tables[sid]
        while (c[0]+1)*s.block_size<=n:
            i=c[0]; c[1]=s._h(c[1],ids[i*s.block_size:(i+1)*s.block_size]); c[0]+=1
            if c[1] not in s.by and t[i] not in s.hash: s.by[c[1]]=t[i]; s.hash[t[i]]=c[1]
    def close(s,sid):
        for b in reversed(s.tables.pop(sid)):
            s.refs[b]-=1
            if s.refs[b]==0:
                if b in s.hash: s.lru[b]=None
                else: s.free.append(b)
        del s.chain[sid]
    def check_integrity(s):
        a=s.free+list(s.lru)+list({b for t in s.tables.values() for b in t})
        if sorted(a)!=list(range(s.num_blocks)): raise IntegrityError("x")
