// What kernels do with PTX on the GPU, in plain C++ for fibers: asynchronous copies, tensor cores, clusters.
struct WarpMatrices { unsigned a[32][4], b[32][2]; const void* rows[32]; };  // by lane
static WarpMatrices all_matrices[16][32];  // by block of the cluster and warp
static WarpMatrices& own_matrices() { return all_matrices[fibers[current].block][threadIdx.x / 32]; }

static int min(int a, int b) { return a < b ? a : b; }
static unsigned __funnelshift_r(unsigned low, unsigned high, int by) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}

// What a thread has under way, in the order in which it was closed: done when it is awaited, and not before.
typedef std::vector<std::function<void()>> Works;
struct Queue {
    Works open;
    std::deque<Works> closed;
    void close() {
        closed.push_back(std::move(open));
        open.clear();
    }
    void await(int pending) {
        while ((int)closed.size() > pending) {
            Works works = std::move(closed.front());
            closed.pop_front();
            for (auto& work : works) work();
        }
    }
};
struct UnderWay { Queue copies, products; };
static std::vector<UnderWay> under_way;  // by thread of the cluster
static Works late_copies;  // of the copy engine

// Half of the copies are there at once: a kernel may neither read too soon nor overwrite too soon.
static void copy_16(void* to, const void* from, bool there) {
    auto copy = [=] {
        if (there) memcpy(to, from, 16);
        else memset(to, 0, 16);
    };
    if (toss()) copy();
    else under_way[current].copies.open.push_back(copy);
}
static void close_copies() { under_way[current].copies.close(); }
template <int PENDING> static void await_copies() {
    static_assert(PENDING >= 0);
    under_way[current].copies.await(PENDING);
}
static void multiply_later(std::function<void()> work) { under_way[current].products.open.push_back(work); }
static void close_products() { under_way[current].products.close(); }
template <int PENDING> static void await_products() {
    give_way();  // others may be faster than the products
    under_way[current].products.await(PENDING);
}

static unsigned short matrix_element(int matrix, int row, int column) {
    return ((const unsigned short*)own_matrices().rows[matrix * 8 + row])[column];
}
static void load_any(unsigned (&to)[4], const void* row, bool transposed) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    own_matrices().rows[lane] = row;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        unsigned low = transposed ? matrix_element(i, 2 * t, g) : matrix_element(i, g, 2 * t);
        unsigned high = transposed ? matrix_element(i, 2 * t + 1, g) : matrix_element(i, g, 2 * t + 1);
        to[i] = low | high << 16;
    }
    __syncwarp();
}
static void load_matrices(unsigned (&to)[4], const void* row) { load_any(to, row, false); }
static void load_transposed(unsigned (&to)[4], const void* row) { load_any(to, row, true); }
static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    WarpMatrices& shared = own_matrices();
    memcpy(shared.a[lane], a, sizeof(a));
    shared.b[lane][0] = b0;
    shared.b[lane][1] = b1;
    __syncwarp();
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++) {
            int holder = k % 8 / 2, upper = k / 8;
            float x = half_of(shared.a[g * 4 + holder][upper * 2 + e / 2], k % 2);
            float y = half_of(shared.b[(t * 2 + e % 2) * 4 + holder][upper], k % 2);
            c[e] += x * y;
        }
    __syncwarp();
}
static bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
static void publish_copies() {}
static float power_of_2(float x) { return exp2f(x); }
static void meet_group(int group, int threads) { meet(own_block.named_meeting[group + 1], threads); }
static void cluster_arrive() {}  // always followed by a wait
static void cluster_arrive_shared() {}
static void cluster_arrive_bare() {}
static void cluster_wait() { meet(cluster_meeting, (int)fibers.size()); }
template <class T> static T pull(const T* place, int rank) {
    size_t offset = (char*)place - own_block.shared.data();
    return *(const T*)(blocks[rank].shared.data() + offset);
}
